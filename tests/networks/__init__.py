"""Networks of every kind that the table of cases puts together, by what is peculiar about them."""
