"""How any operator gets from a checked call to the device. It knows no operator."""
