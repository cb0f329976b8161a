"""From one format of checkpoints to another, in bounded memory."""
