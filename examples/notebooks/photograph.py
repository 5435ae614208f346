# %% [markdown]
# # A photograph
#
# A separable filter is a Kronecker product of two small matrices: one for the columns of the picture,
# one for its rows. For 300 x 451 pixels the dense filter would have 18 billion elements.

# %%
import matplotlib.pyplot as plt
import torch
from skimage import data

from fastkron_py import KroneckerProduct, kron_matmul_left

image = torch.from_numpy(data.chelsea() / 255.0)  # [300, 451, 3]
height, width, channels = image.shape
pixels = image.reshape(height * width, channels)

# %% [markdown]
# ## Blur


# %%
def gaussian(size, sigma=4.0):
    i = torch.arange(size, dtype=torch.float64)
    weights = torch.exp(-0.5 * ((i - i[:, None]) / sigma) ** 2)
    return weights / weights.sum(dim=1, keepdim=True)


blurred = kron_matmul_left([gaussian(height), gaussian(width)], pixels).reshape(image.shape)

# %% [markdown]
# ## Compress
#
# The discrete cosine transform is orthogonal, so its inverse is its transpose. 5% of the coefficients
# are kept.


# %%
def cosines(size):
    i = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(torch.pi * i[:, None] * (i + 0.5) / size) * (2 / size) ** 0.5
    matrix[0] /= 2**0.5
    return matrix


transform = KroneckerProduct([cosines(height), cosines(width)])
coefficients = transform @ pixels
smallest = coefficients.abs().quantile(0.95)
compressed = (transform.T @ torch.where(coefficients.abs() >= smallest, coefficients, 0.0)).reshape(image.shape)
error = (compressed - image).square().mean().sqrt().item()
print(f"error of 5% of the coefficients: {error:.3f} of 1")
assert (transform.T @ coefficients - pixels).abs().max() < 1e-10
assert error < 0.05

# %%
figure, axes = plt.subplots(1, 3, figsize=(12, 3))
for ax, picture, title in zip(axes, (image, blurred, compressed), ("original", "blurred", "5% of the coefficients"), strict=True):
    ax.imshow(picture.clamp(0, 1))
    ax.set_title(title)
    ax.axis("off")
plt.show()
