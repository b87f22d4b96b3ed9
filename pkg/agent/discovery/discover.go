// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/nvml"
)

// Discover is [Looker.Discover] for who looks once.
func Discover(ctx context.Context, lib nvml.Library, sysfs fs.ReadLinkFS) (*Node, error) {
	return new(Looker).Discover(ctx, lib, sysfs)
}

// Discover asks NVML and the kernel about every GPU of the machine. The library
// is opened for as long as it takes; sysfs is the tree below /sys.
//
// The error says that there is no driver to ask (see nvml.Library.Init), or that
// the context has ended. A GPU that does not answer, or not in time, is no error:
// it is listed in Failures and the others are found all the same. A machine
// without a GPU has none in the list.
func (l *Looker) Discover(ctx context.Context, lib nvml.Library, sysfs fs.ReadLinkFS) (*Node, error) {
	logger := klog.FromContext(ctx)
	if err := lib.Init(); err != nil {
		return nil, err
	}
	defer func() {
		if err := lib.Shutdown(); err != nil {
			logger.Error(err, "Close NVML after discovery")
		}
	}()

	// 1. The driver.
	node := &Node{}
	if err := node.askDriver(lib); err != nil {
		return nil, err
	}
	// 2. Each GPU by itself.
	found, err := l.askGPUs(ctx, node, lib, sysfs)
	if err != nil {
		return nil, err
	}
	// 3. How they are connected.
	if err := connect(ctx, found); err != nil {
		return nil, err
	}
	// 4. Which of them are offered, for a start: as they are.
	for _, f := range found {
		node.GPUs = append(node.GPUs, f.gpu)
	}
	node.nameFailures(sysfs)
	node.addBound(sysfs)
	node.Offer(Policy{})
	node.log(logger)
	return node, nil
}

func (n *Node) askDriver(lib nvml.Library) error {
	version, err := lib.DriverVersion()
	if err != nil {
		return fmt.Errorf("ask NVML for the driver's version: %w", err)
	}
	cuda, err := lib.CUDADriverVersion()
	if err != nil {
		return fmt.Errorf("ask NVML for the CUDA version: %w", err)
	}
	n.DriverVersion, n.CUDADriverVersion = version, versionString(cuda)
	return nil
}

// found is a GPU on its way into the Node.
type found struct {
	gpu    GPU
	device nvml.Device
	links  []nvml.NVLink
	fabric *nvml.Fabric
}

// askGPUs returns the GPUs that answer, in order of their PCI addresses, and
// records those that don't.
func (l *Looker) askGPUs(ctx context.Context, n *Node, lib nvml.Library, sysfs fs.ReadLinkFS) ([]*found, error) {
	count, err := lib.DeviceCount()
	if err != nil {
		return nil, fmt.Errorf("ask NVML for the number of GPUs: %w", err)
	}
	var all []*found
	for index := range count {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("discover GPU %d of %d: %w", index, count, err)
		}
		f, err := l.ask(ctx, index, lib, sysfs)
		if err != nil {
			n.Failures = append(n.Failures, Failure{
				Index: index, UUID: f.gpu.UUID, PCIBusID: f.gpu.PCIBusID, Reason: err.Error(), Err: err,
			})
			continue
		}
		all = append(all, f)
	}
	slices.SortFunc(all, func(a, b *found) int { return strings.Compare(a.gpu.PCIBusID, b.gpu.PCIBusID) })
	return all, nil
}

// ask finds out what must be known to hand out the GPU. What identifies it
// comes first, so that a failure can name it.
func (f *found) ask(lib nvml.Library) error {
	d, err := lib.Device(f.gpu.Index)
	if err != nil {
		return err
	}
	f.device = d
	var capability nvml.Version
	var mig nvml.MIGMode
	err = errors.Join(
		set(&f.gpu.UUID, d.UUID),
		set(&f.gpu.PCIBusID, d.PCIBusID),
		set(&f.gpu.Minor, d.MinorNumber),
		set(&f.gpu.ProductName, d.Name),
		set(&f.gpu.Brand, d.Brand),
		set(&f.gpu.Architecture, d.Architecture),
		set(&capability, d.CUDAComputeCapability),
		set(&f.gpu.MemoryBytes, d.MemoryBytes),
		set(&mig, d.MIGMode),
	)
	if err := set(&f.gpu.AddressingMode, d.AddressingMode); err != nil {
		f.warn("addressing mode unknown: %v", err)
	}
	f.gpu.Name = deviceName(f.gpu.PCIBusID)
	f.gpu.CUDAComputeCapability = versionString(capability)
	f.gpu.MIGEnabled = mig.Enabled
	if err == nil {
		f.askMIG(mig, capability)
	}
	return err
}

// set stores an answer unless there is an error.
func set[T any](field *T, ask func() (T, error)) error {
	value, err := ask()
	if err == nil {
		*field = value
	}
	return err
}

// askBus reads what the kernel knows. A GPU is usable without it.
func (f *found) askBus(sysfs fs.ReadLinkFS) {
	root, err := deviceattribute.GetPCIeRootAttributeByPCIBusID(f.gpu.PCIBusID, deviceattribute.WithFS(sysfs))
	if err != nil {
		f.warn("PCIe root unknown: %v", err)
	} else {
		f.gpu.PCIeRoot = *root.Value.StringValue
	}
	numa, err := numaNode(sysfs, f.gpu.PCIBusID)
	if err != nil {
		f.warn("NUMA node unknown: %v", err)
	}
	f.gpu.NUMANode = numa
	f.gpu.Passthrough = askPassthrough(sysfs, f.gpu.PCIBusID)
}

// numaNode returns nil where the kernel reports -1: the firmware names no node.
func numaNode(sysfs fs.FS, busID string) (*int, error) {
	file := "bus/pci/devices/" + busID + "/numa_node"
	data, err := fs.ReadFile(sysfs, file)
	if err != nil {
		return nil, err
	}
	node, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if node < 0 {
		return nil, nil
	}
	return &node, nil
}

// askLanes asks for what the link can be judged by. In a virtual machine the port is one that the hypervisor made: what it
// says is not what the GPU is plugged into.
func (f *found) askLanes(sysfs fs.ReadLinkFS) {
	if virtual, err := f.device.InVirtualMachine(); err == nil && !virtual {
		f.gpu.PortLanes = portLanes(sysfs, f.gpu.PCIBusID)
	}
}

// portLanes is how many lanes the port above the GPU has, 0 where the kernel knows none: the GPU is at the root, or the number is none that
// a link can have (255 stands for an unknown one, 32 is what hypervisors make up).
func portLanes(sysfs fs.ReadLinkFS, busID string) int {
	device := "bus/pci/devices/" + busID
	target, err := sysfs.ReadLink(device)
	if err != nil {
		return 0
	}
	data, err := fs.ReadFile(sysfs, path.Join(path.Dir(device), target, "../max_link_width"))
	if err != nil {
		return 0
	}
	lanes, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil || lanes < 1 || lanes > maxLanes {
		return 0
	}
	return lanes
}

// maxLanes is the widest link that there is.
const maxLanes = 16

// askNVLink asks for the GPU's own side. A GPU is usable without NVLink.
func (f *found) askNVLink() {
	var err error
	if f.links, err = f.device.NVLinks(); err != nil {
		f.warn("NVLinks unknown: %v", err)
	}
	if f.fabric, err = f.device.Fabric(); err != nil {
		f.warn("NVLink fabric unknown: %v", err)
	}
}

func (f *found) warn(format string, args ...any) {
	f.gpu.Warnings = append(f.gpu.Warnings, fmt.Sprintf(format, args...))
}

// log says in one line each what is not published and why.
func (n *Node) log(logger klog.Logger) {
	for _, f := range n.Failures {
		logger.Error(f.Err, "GPU did not answer, not offered", "index", f.Index, "uuid", f.UUID, "pciBusID", f.PCIBusID, "device", f.Device(),
			"candidates", f.Candidates)
	}
	offered := 0
	for _, gpu := range n.GPUs {
		if gpu.NotOffered == "" {
			offered++
		} else {
			logger.Info("GPU not offered", "device", gpu.Name, "uuid", gpu.UUID, "reason", gpu.NotOffered)
		}
		for _, warning := range gpu.Warnings {
			logger.Info("GPU offered without a fact", "device", gpu.Name, "uuid", gpu.UUID, "warning", warning)
		}
	}
	logger.V(2).Info("Discovered GPUs", "driverVersion", n.DriverVersion,
		"offered", offered, "notOffered", len(n.GPUs)-offered, "failed", len(n.Failures))
}

// deviceName makes a DNS label of a PCI address.
func deviceName(busID string) string {
	return NamePrefix + strings.NewReplacer(":", "-", ".", "-").Replace(busID)
}

// BusID is the PCI address of the GPU whose device has that name.
func BusID(device string) string {
	parts := strings.Split(strings.TrimPrefix(device, NamePrefix), "-")
	if len(parts) != 4 {
		return ""
	}
	return fmt.Sprintf("%s:%s:%s.%s", parts[0], parts[1], parts[2], parts[3])
}

func versionString(v nvml.Version) string { return fmt.Sprintf("%d.%d", v.Major, v.Minor) }
