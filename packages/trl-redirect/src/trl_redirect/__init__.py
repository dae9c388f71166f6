"""Run any function through a wrapped model's forward."""

from trl_redirect.redirection import ForwardRedirection, _ForwardRedirection, redirect

__all__ = ["ForwardRedirection", "_ForwardRedirection", "redirect"]
