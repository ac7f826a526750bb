"""What `hybridpar doctor` looks at on a machine."""
