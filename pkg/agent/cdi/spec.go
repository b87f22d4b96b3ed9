// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/pkg/parser"
	"tags.cncf.io/container-device-interface/specs-go"
)

const (
	// Vendor and Class of all CDI devices made here; see the package comment.
	Vendor = "k8s.gpu.nvidia.com"
	Class  = "claim"

	// visibleDevices is the variable that NVIDIA's container runtimes act on.
	visibleDevices = "NVIDIA_VISIBLE_DEVICES"
	// envPrefix precedes the device name in the variables that name a container's GPUs.
	envPrefix = "STOWAGE_"
	// sharePrefix precedes it in those that say how much of a GPU a container has.
	sharePrefix = "SHARE_"
)

// GPU is a physical GPU or a MIG device of it, as far as a container's view of it is concerned.
type GPU struct {
	// Name is the physical GPU's stable name from the PCI address, such as gpu-0000-1b-00-0.
	Name string
	// UUID as NVML has it, such as GPU-… or MIG-….
	UUID string
	// PCIBusID of the physical GPU, as the kernel writes it.
	PCIBusID string
	// Minor is the number in /dev/nvidia<minor> of the physical GPU.
	Minor int
}

// Device is one allocation result of a claim.
type Device struct {
	// Request is the request's name, with the subrequest after a slash if there is one.
	Request string
	// Name is the device's name in its ResourceSlice.
	Name string
	GPU  GPU
	// Share is the allocation's ID if the device is a share of the GPU, empty else.
	Share types.UID
	// Nodes, by their names below /dev, are what a container gets in place of the GPU; none for a GPU of the NVIDIA driver.
	// The GPU's UUID then is what the container shall be told of it.
	Nodes []string
	// Extra is what containers get beside the GPU itself; nil for nothing.
	Extra *specs.ContainerEdits
	// Mounts beside those.
	Mounts []*specs.Mount
}

// Backend knows what a container must be given to use a GPU of this node.
type Backend interface {
	// Ready makes sure that what all containers with a GPU need of the agent is there. Otherwise [Backend.CommonEdits] fails, too.
	Ready(ctx context.Context) error
	// CommonEdits is what every container with a GPU needs, applied once per claim.
	CommonEdits(ctx context.Context) (*specs.ContainerEdits, error)
	// ControlNodes makes sure that the device nodes are there that whatever uses CUDA opens. NVML is not asked: it need not be loaded yet.
	ControlNodes(ctx context.Context) error
	// GPUEdits is what a container with this GPU needs on top. It makes sure that the device nodes it
	// names exist.
	GPUEdits(ctx context.Context, gpu GPU) (*specs.ContainerEdits, error)
	// VisibleDevices returns the value of NVIDIA_VISIBLE_DEVICES for a container with these GPUs.
	VisibleDevices(uuids []string) string
	// NodeEdits make the nodes with these names below /dev visible in a container. It makes sure that they exist.
	NodeEdits(ctx context.Context, names []string) (*specs.ContainerEdits, error)
}

// DeviceID returns the fully qualified CDI name of a claim's device, as the kubelet is told.
func DeviceID(claim types.UID, request, device string) string {
	return ShareDeviceID(claim, request, device, "")
}

// ShareDeviceID is DeviceID for a share of a GPU, of which one request can have several.
func ShareDeviceID(claim types.UID, request, device string, share types.UID) string {
	return parser.QualifiedName(Vendor, Class, deviceName(claim, request, device, share))
}

// deviceName joins with underscores, which occur in none of the parts (DNS labels and UUIDs), so that two
// different results never get one name. A subrequest's slash, which CDI does not admit, becomes a dot.
func deviceName(claim types.UID, request, device string, share types.UID) string {
	parts := []string{string(claim), strings.ReplaceAll(request, "/", "."), device}
	if share != "" {
		parts = append(parts, string(share))
	}
	return strings.Join(parts, "_")
}

// BuildSpec describes the claim's devices for the container runtime.
func BuildSpec(ctx context.Context, backend Backend, claim types.UID, devices []Device) (*specs.Spec, error) {
	common, forAll, err := commonEdits(ctx, backend, devices)
	if err != nil {
		return nil, fmt.Errorf("find out what every container with a GPU needs: %w", err)
	}
	uuids := map[string][]string{}
	for _, device := range devices {
		if device.passedThrough() || slices.Contains(uuids[device.Request], device.GPU.UUID) { // the latter: two shares of a GPU
			continue
		}
		uuids[device.Request] = append(uuids[device.Request], device.GPU.UUID)
	}
	spec := &specs.Spec{Kind: Vendor + "/" + Class}
	if forAll {
		spec.ContainerEdits = *common
	}
	for _, device := range devices {
		edits, err := device.edits(ctx, backend)
		if err != nil {
			return nil, fmt.Errorf("find out what a container with device %s (%s) needs: %w", device.Name, device.GPU.UUID, err)
		}
		visible := noDevices
		if !device.passedThrough() {
			visible = backend.VisibleDevices(uuids[device.Request])
			if !forAll {
				edits = both(common, edits)
			}
		}
		if device.Extra != nil {
			edits.Env = append(edits.Env, device.Extra.Env...)
			edits.Mounts = append(edits.Mounts, device.Extra.Mounts...)
		}
		edits.Mounts = append(edits.Mounts, device.Mounts...)
		edits.Env = append(edits.Env,
			envPrefix+envName(device.Name)+"="+device.GPU.UUID,
			visibleDevices+"="+visible,
		)
		spec.Devices = append(spec.Devices, specs.Device{
			Name:           deviceName(claim, device.Request, device.Name, device.Share),
			ContainerEdits: *edits,
		})
	}
	version, err := specs.MinimumRequiredVersion(spec)
	if err != nil {
		return nil, fmt.Errorf("CDI version for claim %s: %w", claim, err)
	}
	spec.Version = version
	return spec, nil
}

// ShareEnv tells a container what its request has of a GPU that it shares with others: the memory in MiB and, if there is one, the limit of
// the GPU's compute in percent. It is for programs that keep to it; nothing else enforces it.
func ShareEnv(device string, memoryMiB int64, percent int) []string {
	name := sharePrefix + envName(device)
	env := []string{fmt.Sprintf("%s_MEMORY_MIB=%d", name, memoryMiB)}
	if percent > 0 {
		env = append(env, fmt.Sprintf("%s_COMPUTE_PERCENT=%d", name, percent))
	}
	return env
}

// envName writes a device name, a DNS label, the way environment variables are written.
func envName(device string) string {
	return strings.ToUpper(strings.ReplaceAll(device, "-", "_"))
}
