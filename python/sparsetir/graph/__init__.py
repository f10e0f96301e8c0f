"""Message passing models through `torch.compile(model, backend="sparsetir")`."""
