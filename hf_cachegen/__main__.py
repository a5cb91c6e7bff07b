"""``python -m hf_cachegen``, which is what ``accelerate launch -m hf_cachegen`` starts."""

from hf_cachegen.cli import main

if __name__ == "__main__":
    main()
