"""torch_geometric: graph classification, batches of graphs that it joins into one."""

import torch
from common import device, options
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

args = options(32)
gpu = device()


class GCN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(16, 64), GCNConv(64, 64)
        self.out = torch.nn.Linear(64, 4)

    def forward(self, x, edges, batch):
        x = self.first(x, edges).relu()
        return self.out(global_mean_pool(self.second(x, edges).relu(), batch))


graphs = [
    Data(
        x=torch.randn(nodes, 16),
        edge_index=torch.randint(nodes, (2, 4 * nodes)),
        y=torch.randint(4, (1,)),
    )
    for nodes in torch.randint(10, 40, (960,)).tolist()
]
model = GCN().to(gpu)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for data in DataLoader(graphs, batch_size=args.batch_size, shuffle=True):
    data = data.to(gpu)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(data.x, data.edge_index, data.batch), data.y)
    loss.backward()
    optimizer.step()
