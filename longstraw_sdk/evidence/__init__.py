"""Evidence: parity with conventional autograd, memory traces."""
