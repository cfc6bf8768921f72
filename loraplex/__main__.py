"""`python -m loraplex` is the `loraplex` command."""

from loraplex.launcher.__main__ import main

if __name__ == "__main__":
    main()
