"""The task ``image``: ResNet-18 on small pictures."""
