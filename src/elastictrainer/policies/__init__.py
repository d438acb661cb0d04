"""What yields plans over time: elastic and everything it is compared with."""
