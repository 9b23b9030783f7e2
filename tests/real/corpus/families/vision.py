"""Images: classification, detection, segmentation, and generating them."""

from corpus.family import ADAM, MOMENTUM, Family, HandSum

FAMILIES = (
    Family(
        name="torchvision-classify",
        about="MobileNetV3 with SGD, StepLR, torchmetrics, FakeData",
        packages=("torchvision", "torchmetrics"),
        command="python {scripts}/tv_classify.py --batch-size={batch}",
        starts=(32, 128),
        hand=HandSum(parameters=1_528_106, state_bytes=MOMENTUM, samples=1024),
    ),
    Family(
        name="torchvision-fasterrcnn",
        about="Faster R-CNN with MobileNetV3 and FPN, images of varying size",
        packages=("torchvision",),
        command="python {scripts}/tv_detection.py box --batch-size={batch}",
        starts=(2, 4),
        hand=HandSum(parameters=18_959_754, state_bytes=MOMENTUM, samples=64),
    ),
    Family(
        name="torchvision-maskrcnn",
        about="Mask R-CNN with ResNet-50 and FPN, as detectron-like projects use it",
        packages=("torchvision",),
        command="python {scripts}/tv_detection.py mask --batch-size={batch}",
        starts=(2, 4),
        # The published 44,401,393 with 3 classes in the place of 91 (boxes, scores, masks), and
        # the norms of a ResNet-50 that is trained from scratch.
        hand=HandSum(
            parameters=44_401_393 - 88 * (5 * 1025 + 257) + 53_120,
            state_bytes=MOMENTUM,
            samples=64,
        ),
    ),
    Family(
        name="smp-unet",
        about="Unet with a ResNet-18, Dice loss, IoU in the loop",
        packages=("segmentation_models_pytorch",),
        command="python {scripts}/smp_unet.py --batch-size={batch}",
        starts=(8, 32),
        hand=HandSum(parameters=14_328_499, state_bytes=ADAM, samples=512),
    ),
    Family(
        name="monai-unet3d",
        about="3D U-Net on MetaTensors, dictionary transforms, Dice loss",
        packages=("monai",),
        command="python {scripts}/monai_unet.py --batch-size={batch}",
        starts=(2, 8),
        hand=HandSum(parameters=136_342, samples=64),
    ),
    Family(
        name="diffusers-unet",
        about="unconditional diffusion with accelerate, cosine schedule, EMA",
        packages=("diffusers", "accelerate"),
        command="python {scripts}/diffusers_unet.py --batch-size={batch}",
        starts=(8, 32),
        hand=HandSum(parameters=1_113_955, samples=512),
    ),
    Family(
        name="diffusers-lora",
        about="LoRA on a frozen conditional UNet, accelerate accumulates over 2",
        packages=("diffusers", "peft"),
        command="python {scripts}/diffusers_lora.py --batch-size={batch}",
        starts=(2, 8),
        hand=HandSum(parameters=814_212, trained=11_008, accumulation=2, samples=256),
    ),
    Family(
        name="dcgan",
        about="two networks with two Adams; images and weights are saved",
        packages=("torch", "torchvision"),
        command="python {scripts}/dcgan.py --batch-size={batch}",
        starts=(32, 64),
        hand=HandSum(parameters=296_896 + 167_872, samples=320),
    ),
    Family(
        name="vae",
        about="fully connected variational autoencoder",
        packages=("torch",),
        command="python {scripts}/vae.py --batch-size={batch}",
        starts=(128, 512),
        hand=HandSum(parameters=785 * 400 + 2 * 401 * 20 + 21 * 400 + 401 * 784, samples=6400),
    ),
    Family(
        name="mnist",
        about="small convolutional network, Adadelta, test and checkpoint in each epoch",
        packages=("torch",),
        command="python {scripts}/mnist.py --batch-size={batch}",
        starts=(64, 256),
        hand=HandSum(parameters=10 * 32 + (9 * 32 + 1) * 64 + 9217 * 128 + 129 * 10, samples=3840),
    ),
    Family(
        name="accelerate",
        about="accelerate's loop, gradient_accumulation_steps=4, save_state",
        packages=("accelerate", "torchvision"),
        command="python {scripts}/accelerate_loop.py --batch-size={batch}",
        starts=(16, 64),
        hand=HandSum(parameters=727_626, accumulation=4, samples=1536),
    ),
    Family(
        name="yolo-classify",
        about="console script yolo, classification from scratch, images in folders",
        packages=("ultralytics",),
        prepare="python {scripts}/yolo_data.py classify {data}",
        command="yolo classify train model=yolo11n-cls.yaml data={data} imgsz=64 epochs=2 "
        "workers=0 optimizer=AdamW batch={batch} device=0 "
        "project={data}/runs name=train",
        cpu_command="yolo classify train model=yolo11n-cls.yaml data={data} imgsz=64 epochs=2 "
        "workers=0 optimizer=AdamW batch={batch} device=cpu "
        "project={data}/runs name=train",
        starts=(8, 16),
        # 2,812,104 (1000 classes) less 997 rows of 1,281; the model and its average. The final
        # evaluation folds 5,080 norms into their convolutions: a scale and a shift become a bias.
        # Batches are accumulated up to ultralytics' nominal batch size of 64.
        hand=HandSum(
            parameters=2 * 1_534_947,
            trained=1_534_947,
            samples=96,
            evaluated=1_534_947 - 5_080,
            effective=64,
        ),
        left_out={"bare: parameters": "a model with 1000 classes is also called, to time it"},
    ),
)
