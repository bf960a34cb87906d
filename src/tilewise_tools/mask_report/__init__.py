"""Pictures, figures and tables of masks and of the plans made for them."""
