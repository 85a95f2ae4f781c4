"""The systems that the paper compares with, each one file behind the interface of `tracformer.model.base`."""
