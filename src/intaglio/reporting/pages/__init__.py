"""The page of a report: its picture of the network, its tables, and the template that prints them."""
