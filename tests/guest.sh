#!/bin/bash
# Runs a test in a virtual machine with Debian's kernel, which tracks what processes change in their
# memory (soft-dirty pages). Many kernels do not, and there the tests see only what HarvestFS does without.
#
#   tests/guest.sh [TEST [FILTER]]      for example: tests/guest.sh checkpoint a_job_that_goes_on
#
# Needs root, about 3 GiB in target/guest, and
#   apt install qemu-system-x86 cpio kmod e2fsprogs debootstrap
# The processor is emulated where KVM cannot run an ordinary kernel (KVM=1 uses it): a test that takes
# seconds takes minutes. The guest's console is printed; the status is that of the test.

set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin

TEST=${1:-checkpoint}
FILTER=${2:-a_job_that_goes_on}
TARGET=${CARGO_TARGET_DIR:-$PWD/target}
GUEST=$TARGET/guest
DEADLINE=1800s
MODULES=(virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci virtio_blk)

for program in qemu-system-x86_64 cpio depmod mkfs.ext4 debootstrap; do
    command -v "$program" >/dev/null || {
        echo "$program is missing: apt install qemu-system-x86 cpio kmod e2fsprogs debootstrap" >&2
        exit 1
    }
done

# Debian's kernel and a shell for the start, unpacked and not installed.
mkdir -p "$GUEST"
if [ ! -e "$GUEST/packages/boot" ]; then
    rm -rf "$GUEST/packages" "$GUEST/packages.new"
    mkdir "$GUEST/packages.new"
    kernel=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image/ { print $2; exit }')
    (cd "$GUEST/packages.new" && apt-get -qq download "$kernel" busybox-static)
    for package in "$GUEST"/packages.new/*.deb; do
        dpkg-deb -x "$package" "$GUEST/packages.new"
    done
    mv "$GUEST/packages.new" "$GUEST/packages"
fi
RELEASE=$(ls "$GUEST/packages/lib/modules")

# What the kernel starts with: it mounts the disk.
rm -rf "$GUEST/start" "$GUEST/root"
mkdir -p "$GUEST"/start/{bin,modules,proc,sys,dev,new}
cp "$GUEST/packages/bin/busybox" "$GUEST/start/bin/"
for module in "${MODULES[@]}"; do
    find "$GUEST/packages" -name "$module.ko" -exec cp {} "$GUEST/start/modules/" \;
done
cat >"$GUEST/start/init" <<EOS
#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
for module in ${MODULES[*]}; do
    /bin/busybox insmod /modules/\$module.ko
done
until /bin/busybox mount -t ext4 /dev/vda /new; do /bin/busybox sleep 0.2; done
/bin/busybox mount --move /dev /new/dev
exec /bin/busybox switch_root /new /init
EOS
chmod +x "$GUEST/start/init"
(cd "$GUEST/start" && find . | cpio --quiet -o -H newc | gzip -1) >"$GUEST/start.gz"

# The disk: the system that CRIU comes with, and the test at the path that it was built at.
criu=$(tests/criu-root.sh "${HARVESTFS_CACHE:-$PWD/.ci/cache}")
cp -a "$(dirname "$criu")/root" "$GUEST/root"
cp -a "$GUEST/packages/lib/modules" "$GUEST/root/usr/lib/"
depmod -b "$GUEST/root" "$RELEASE"
cp "$GUEST/packages/bin/busybox" "$GUEST/root/usr/bin/"
for directory in proc sys dev; do
    rm -rf "${GUEST:?}/root/$directory"
    mkdir "$GUEST/root/$directory"
done
built=$(cargo test --locked --workspace --no-run --test "$TEST" --test command_line --message-format json |
    grep -o "\"executable\":\"[^\"]*/$TEST-[^\"]*\"" | cut -d'"' -f4)
for file in "$built" "$(dirname "$built")/../harvestfs"; do
    directory=$(realpath -m "$(dirname "$file")")
    mkdir -p "$GUEST/root$directory"
    strip -g -o "$GUEST/root$directory/$(basename "$file")" "$file"
done
# Everything is built and unpacked already.
stub() {
    mkdir -p "$(dirname "$GUEST/root$1")"
    printf '#!/bin/sh\n%s\n' "$2" >"$GUEST/root$1"
    chmod +x "$GUEST/root$1"
}
stub "$(rustup which cargo)" "exit 0"
stub /usr/bin/debootstrap "exit 0"
stub "$PWD/tests/criu-root.sh" "echo /usr/sbin/criu"
stub /init "
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HARVESTFS_TESTS_NO_SKIP=1
mount -t proc proc /proc
mount -t sysfs sys /sys
for directory in /tmp /run /dev/shm; do
    mkdir -p \$directory
    mount -t tmpfs tmp \$directory
done
mkdir -p /dev/pts
mount -t devpts pts /dev/pts
for module in fuse nfnetlink nf_tables veth tun unix_diag inet_diag tcp_diag udp_diag netlink_diag af_packet_diag; do
    busybox modprobe \$module
done
busybox ip link set lo up
cd $PWD/tests
$built --nocapture --test-threads 1 $FILTER && echo 'guest: passed'
busybox poweroff -f"
rm -f "$GUEST/disk"
mkfs.ext4 -q -F -d "$GUEST/root" "$GUEST/disk" 8G

if [ "${KVM:-0}" = 1 ]; then
    processor=(-accel kvm -cpu host)
else
    processor=(-accel "tcg,thread=multi" -cpu max)
fi
timeout "$DEADLINE" qemu-system-x86_64 "${processor[@]}" -smp 2 -m 4G -nographic -no-reboot \
    -kernel "$GUEST/packages/boot/vmlinuz-$RELEASE" -initrd "$GUEST/start.gz" \
    -append "console=ttyS0 quiet panic=-1" \
    -drive "file=$GUEST/disk,if=virtio,format=raw,cache=unsafe" </dev/null | tee "$GUEST/console"
rm -rf "$GUEST/root" "$GUEST/start" "$GUEST/disk"
grep -q "^guest: passed" "$GUEST/console"
