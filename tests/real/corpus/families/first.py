"""The five families that the corpus began with."""

from corpus.family import ADAM, MOMENTUM, Family, HandSum

FAMILIES = (
    Family(
        name="timm",
        about="ConvNeXt with timm's AdamW, cosine schedule and loss; 2 micro-batches a step",
        packages=("timm",),
        command="python {scripts}/timm_train.py --batch-size={batch} --grad-accum-steps=2",
        starts=(16, 64),
        hand=HandSum(parameters=3_377_730, state_bytes=ADAM, accumulation=2, samples=1024),
    ),
    Family(
        name="transformers-bert",
        about="Trainer, classification of texts of varying length (padded per batch)",
        packages=("transformers",),
        command="python {scripts}/hf_bert.py --batch-size={batch}",
        starts=(16, 128),
        hand=HandSum(
            # Embeddings with their norm, four blocks, the pooler, the classifier.
            parameters=(4000 + 512 + 2 + 2) * 256
            + 4 * (12 * 256**2 + 13 * 256)
            + (256 + 1) * 256
            + (256 + 1) * 2,
            samples=2048,
        ),
    ),
    Family(
        name="transformers-gpt2",
        about="Trainer, causal language model in bf16, gradient_accumulation_steps=4",
        packages=("transformers",),
        command="python {scripts}/hf_gpt2.py --per_device_train_batch_size={batch}",
        starts=(4, 16),
        # Embeddings of words and positions, four blocks, the last norm.
        hand=HandSum(
            parameters=(5000 + 128) * 256 + 4 * (12 * 256**2 + 13 * 256) + 2 * 256,
            accumulation=4,
            samples=4096,
        ),
    ),
    Family(
        name="lightning",
        about="LightningModule with a ResNet-18, accumulate_grad_batches=2",
        packages=("lightning", "torchvision"),
        command="python {scripts}/lightning_images.py --batch-size={batch} --accumulate=2",
        starts=(16, 64),
        # The published ResNet-18 with 10 classes in the place of 1000.
        hand=HandSum(parameters=11_689_512 - 990 * 513, accumulation=2, samples=1280),
    ),
    Family(
        name="yolo-detect",
        about="console script yolo, detection with YOLO11n's layout from scratch",
        packages=("ultralytics",),
        prepare="python {scripts}/yolo_data.py detect {data}",
        command="yolo detect train model=yolo11n.yaml data={data}/data.yaml imgsz=96 epochs=2 "
        "workers=0 optimizer=SGD batch={batch} device=0 "
        "project={data}/runs name=train",
        cpu_command="yolo detect train model=yolo11n.yaml data={data}/data.yaml imgsz=96 epochs=2 "
        "workers=0 optimizer=SGD batch={batch} device=cpu "
        "project={data}/runs name=train",
        starts=(8, 16),
        # 2,624,080 (published) with 2 classes in the place of 80; the model and its average. The
        # 16 bins of a box's sides are fixed. Batches are accumulated up to the nominal 64.
        hand=HandSum(
            parameters=2 * 2_590_230,
            trained=2_590_230,
            state_bytes=MOMENTUM,
            samples=96,
            idle=16,
            evaluated=2_582_542,
            effective=64,
        ),
        left_out={"bare: parameters": "a model with 80 classes is also called, to time it"},
    ),
)
