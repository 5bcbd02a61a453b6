"""Build the objects that a spec asks for (layer 8): the only package that names concrete classes.

`recipes/` calls it. Heavy packages are imported inside its functions, so that a wrong spec is refused first.
"""
