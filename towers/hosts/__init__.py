"""Which hosts train together: values and questions, without what connects them."""
