# %% [markdown]
# # Fine-tune with LoKr
#
# A small network learns a task. PEFT adds LoKr adapters to it, and they learn another task. With
# `use_fastkron` the adapters' weights are never built. The losses stay the same. Everything is in
# float64 here, so that rounding does not hide a difference.

# %%
import copy

import peft
import torch

from fastkron_py.integrations.peft import use_fastkron

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = torch.nn.Linear(16, 128), torch.nn.Linear(128, 128), torch.nn.Linear(128, 1)

    def forward(self, x):
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


def train(model, target, steps=200):
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.003)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %% [markdown]
# ## Train the network

# %%
x = torch.randn(1024, 16)
network = Network()
losses = train(network, torch.sin(x.sum(dim=1, keepdim=True)))
print(f"first task: loss {losses[0]:.3f} to {losses[-1]:.3f}")

# %% [markdown]
# ## Add adapters, by PEFT alone and with fastkron_py

# %%
config = peft.LoKrConfig(r=8, alpha=8, target_modules=["first", "second"])
stock = peft.get_peft_model(network, config)
ours = copy.deepcopy(stock)
applied = use_fastkron(ours)
print("replaced:", applied.replaced)

# %% [markdown]
# ## Fine-tune both on another task

# %%
target = torch.cos(x.sum(dim=1, keepdim=True))
of_stock, of_ours = train(stock, target), train(ours, target)
largest = max(abs(a - b) for a, b in zip(of_stock, of_ours, strict=True))
print(f"second task: loss {of_ours[0]:.3f} to {of_ours[-1]:.3f}; largest difference from PEFT alone {largest:.1e}")
assert of_ours[-1] < of_ours[0] / 2
assert largest < 1e-6

# %% [markdown]
# ## Merge
#
# Saving and merging work as before.

# %%
outputs = ours(x)
merged = ours.merge_and_unload()
difference = (merged(x) - outputs).abs().max().item()
print(f"largest difference of the merged model: {difference:.1e}")
assert difference < 1e-10
