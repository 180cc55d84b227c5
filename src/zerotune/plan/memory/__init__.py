"""The memory a plan needs, by component: values, arithmetic and reports."""
