"""The matrices that a parameter is made of, and the ranks on which its boxes lie."""
