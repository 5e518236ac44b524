"""The names of torch.cuda, with a virtual device behind them."""
