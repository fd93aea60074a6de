"""How good images and videos are: scores against real ones, and pages that show them."""
