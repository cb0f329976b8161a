"""What a run or a checkpoint contains, and whether all of it is as it was written."""
