# %% [markdown]
# # A Gaussian process on a grid
#
# Measurements at 24 places and 200 times have the covariance `S (x) T + s I`: a Kronecker product of
# 24 x 24 and 200 x 200, and noise. The dense matrix has 23 million elements. It is never built.

# %%
import matplotlib.pyplot as plt
import torch

from fastkron_py import KroneckerProduct

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
options = {"dtype": torch.float64, "device": device}
places, times = torch.linspace(0, 1, 24, **options), torch.linspace(0, 1, 200, **options)


def kernel(points, scale):
    return torch.exp(-0.5 * ((points - points[:, None]) / scale) ** 2) + 1e-8 * torch.eye(len(points), **options)


# %% [markdown]
# ## Data
#
# A draw from the model, with length scales 0.2 and 0.05 and noise of deviation 0.3.

# %%
true = KroneckerProduct([kernel(places, 0.2), kernel(times, 0.05)]).add_diagonal(1e-6)
field = true.sample(generator=torch.Generator(device).manual_seed(1)).reshape(24, 200)
y = field + 0.3 * torch.randn(24, 200, **options)

# %% [markdown]
# ## Learn the length scales and the noise
#
# `inv_quad_logdet` gives both terms of the likelihood, with gradients.

# %%
logarithms = torch.tensor([-1.0, -2.0, 0.0], **options).requires_grad_()  # of two length scales and the noise's variance
optimizer = torch.optim.Adam([logarithms], lr=0.1)
losses = []
for _ in range(60):
    optimizer.zero_grad()
    scales = logarithms.exp()
    model = KroneckerProduct([kernel(places, scales[0]), kernel(times, scales[1])]).add_diagonal(scales[2])
    quadratic, logdet = model.inv_quad_logdet(y.flatten())
    loss = 0.5 * (quadratic + logdet) / y.numel()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
space, time, noise = logarithms.exp().tolist()
print(f"length scales {space:.3f} and {time:.4f} (true: 0.2 and 0.05), noise {noise**0.5:.3f} (true: 0.3)")
assert abs(noise**0.5 - 0.3) < 0.03

# %% [markdown]
# ## Predict the field
#
# The mean is `K (K + s I)^-1 y`: a solve and a product.

# %%
with torch.no_grad():
    K = KroneckerProduct([kernel(places, space), kernel(times, time)])
    mean = (K @ K.add_diagonal(noise).solve(y.flatten())).reshape(24, 200)
error, before = ((mean - field).square().mean().sqrt().item(), (y - field).square().mean().sqrt().item())
print(f"error of the measurements {before:.3f}, of the prediction {error:.3f}")
assert error < before / 2

# %%
figure, axes = plt.subplots(3, 1, figsize=(8, 5), sharex=True)
for ax, values, title in zip(axes, (y, mean, field), ("measured", "predicted", "true"), strict=True):
    ax.imshow(values.cpu(), aspect="auto", vmin=-3, vmax=3)
    ax.set_title(title)
plt.show()
