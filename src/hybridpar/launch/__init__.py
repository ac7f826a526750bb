"""Starting the processes of a job, giving each its role, and ending them."""
