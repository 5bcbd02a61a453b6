"""An engine as an HTTP service, the other side of `engine/server/`.

service.py has the routes; weight_control.py decides which trainer may change the weights, and when.
"""
