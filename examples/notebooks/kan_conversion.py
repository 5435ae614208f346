# %% [markdown]
# # Convert a ChebyKAN network
#
# A network with layers of ChebyKAN is trained by plain torch. `convert_kan` then replaces its layers.
# The outputs stay the same.

# %%
import torch

from fastkron_py.nn import PolyKANLinear, convert_kan

torch.manual_seed(0)


class ChebyKANLayer(torch.nn.Module):
    """The formula of ChebyKAN, degree by degree, with its coefficients [in, out, degree + 1]."""

    def __init__(self, inputs, outputs, degree):
        super().__init__()
        self.cheby_coeffs = torch.nn.Parameter(torch.randn(inputs, outputs, degree + 1) / (inputs * (degree + 1)))

    def forward(self, x):
        t = torch.tanh(x)
        values = [torch.ones_like(t), t]
        while len(values) < self.cheby_coeffs.shape[2]:
            values.append(2 * t * values[-1] - values[-2])
        return torch.einsum("bid,iod->bo", torch.stack(values, dim=2), self.cheby_coeffs)


network = torch.nn.Sequential(ChebyKANLayer(2, 32, 6), torch.nn.LayerNorm(32), ChebyKANLayer(32, 1, 6))

# %% [markdown]
# ## Train it

# %%
x = 2 * torch.rand(2048, 2) - 1
target = (torch.sin(4 * x[:, :1]) * torch.exp(-x[:, 1:])).detach()


def train(model, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


print(f"loss after 200 steps: {train(network, 200):.4f}")

# %% [markdown]
# ## Convert it
#
# The layers between stay. `network` itself does not change.

# %%
converted = convert_kan(network)
print(converted)
difference = (converted(x) - network(x)).abs().max().item()
print(f"largest difference of an output: {difference:.1e}")
assert difference < 1e-5
assert sum(isinstance(module, PolyKANLinear) for module in converted.modules()) == 2

# %% [markdown]
# ## Go on training

# %%
loss = train(converted, 200)
print(f"loss after 200 more steps: {loss:.4f}")
assert loss < 0.05
