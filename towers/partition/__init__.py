"""Any function of a batch on several towers, as on one device."""
