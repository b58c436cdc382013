"""Jobs over whole stores and queues, on Spark: the commands of `warren spark`, one a file."""
