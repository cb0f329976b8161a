"""Update rules on the tensors of chunks: by operations of torch, and by kernels with their bits."""
