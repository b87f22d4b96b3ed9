// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	"tags.cncf.io/container-device-interface/specs-go"
)

// nvidiaMajor is the real driver's; a simulated GPU never has it.
const nvidiaMajor = 195

// Minors of the control nodes, above those that GPUs can have.
const (
	minorControl = 255
	minorUVM     = 253
)

// experimentalMajors are set aside for local use by the kernel's list of devices
// (Documentation/admin-guide/devices.txt). 240-254 is too, but the kernel gives numbers out of that range to
// drivers as they load, so it is left alone.
var experimentalMajors = []int{120, 121, 122, 123, 124, 125, 126, 127, 60, 61, 62, 63}

// Simulated is the Backend of simulated GPUs. Containers get real device nodes with numbers that no driver
// has: they can be seen, and opening one gets as far as the missing driver (ENXIO) if the container was
// allowed the device, and not so far (EPERM) if it was not.
type Simulated struct {
	devRoot string
	major   int
	// makeNodes is false where the agent may not make device nodes; then containers' nodes are described
	// by their numbers alone and the runtime makes them.
	makeNodes bool
	mknod     func(path string, mode uint32, dev int) error

	mu sync.Mutex // serialises the making of nodes
}

var _ Backend = (*Simulated)(nil)

// SimulatedOptions are the places that NewSimulated looks at.
type SimulatedOptions struct {
	// DevRoot is the folder in which nodes are made, never the machine's /dev.
	DevRoot string
	// ProcRoot is /proc.
	ProcRoot string
	// Mknod makes a node; unix.Mknod if nil.
	Mknod func(path string, mode uint32, dev int) error
}

// NewSimulated refuses to simulate GPUs where a real driver is loaded. It makes the control nodes, and falls back to
// describing nodes without making them where that is not permitted, which it says in the log.
func NewSimulated(ctx context.Context, opts SimulatedOptions) (*Simulated, error) {
	driver := filepath.Join(opts.ProcRoot, "driver", "nvidia")
	if _, err := os.Stat(driver); err == nil {
		return nil, fmt.Errorf("simulated GPUs are refused: %s exists, so a real NVIDIA driver is loaded on this machine", driver)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("look for a real NVIDIA driver: %w", err)
	}
	devRoot, err := filepath.Abs(opts.DevRoot)
	if err != nil {
		return nil, fmt.Errorf("folder for simulated device nodes: %w", err)
	}
	if devRoot == "/dev" || devRoot == "/" {
		return nil, fmt.Errorf("folder for simulated device nodes is %s: it must be one of its own", devRoot)
	}
	major, err := freeMajor(filepath.Join(opts.ProcRoot, "devices"))
	if err != nil {
		return nil, err
	}
	s := &Simulated{devRoot: devRoot, major: major, makeNodes: true, mknod: opts.Mknod}
	if s.mknod == nil {
		s.mknod = unix.Mknod
	}
	if err := os.MkdirAll(devRoot, 0o755); err != nil {
		return nil, fmt.Errorf("make the folder for simulated device nodes: %w", err)
	}
	for _, node := range s.controlNodes() {
		err := s.ensure(node)
		if errors.Is(err, fs.ErrPermission) {
			klog.FromContext(ctx).
				Info("Device nodes cannot be made here: containers get simulated GPUs by device number, without a node on the host",
					"folder", devRoot, "reason", err.Error())
			s.makeNodes = false
			break
		}
		if err != nil {
			return nil, err
		}
	}
	return s, nil
}

// Ready implements Backend.
func (*Simulated) Ready(context.Context) error { return nil }

// CommonEdits implements Backend: the control nodes.
func (s *Simulated) CommonEdits(context.Context) (*specs.ContainerEdits, error) {
	return s.edits(s.controlNodes()...)
}

// ControlNodes implements Backend.
func (s *Simulated) ControlNodes(context.Context) error {
	_, err := s.edits(s.controlNodes()...)
	return err
}

// GPUEdits implements Backend: the GPU's own node.
func (s *Simulated) GPUEdits(_ context.Context, gpu GPU) (*specs.ContainerEdits, error) {
	if gpu.Minor < 0 || gpu.Minor >= minorUVM {
		return nil, fmt.Errorf("minor number %d of %s is out of range", gpu.Minor, gpu.Name)
	}
	return s.edits(simulatedNode{name: "nvidia" + strconv.Itoa(gpu.Minor), minor: gpu.Minor})
}

// VisibleDevices implements Backend: nothing acts on the variable in simulation, so it may tell the truth.
func (s *Simulated) VisibleDevices(uuids []string) string { return strings.Join(uuids, ",") }

type simulatedNode struct {
	name  string
	minor int
}

func (s *Simulated) controlNodes() []simulatedNode {
	return []simulatedNode{{name: "nvidiactl", minor: minorControl}, {name: "nvidia-uvm", minor: minorUVM}}
}

func (s *Simulated) edits(nodes ...simulatedNode) (*specs.ContainerEdits, error) {
	edits := &specs.ContainerEdits{}
	for _, node := range nodes {
		device := &specs.DeviceNode{
			Path:        "/dev/" + node.name,
			Type:        "c",
			Major:       int64(s.major),
			Minor:       int64(node.minor),
			FileMode:    ptr.To(fs.FileMode(0o666)),
			Permissions: "rw",
		}
		if s.makeNodes {
			if err := s.ensure(node); err != nil {
				return nil, err
			}
			device.HostPath = s.path(node)
		}
		edits.DeviceNodes = append(edits.DeviceNodes, device)
	}
	return edits, nil
}

func (s *Simulated) path(node simulatedNode) string { return filepath.Join(s.devRoot, node.name) }

// ensure makes the node, replacing anything else of that name in the agent's own folder. The node belongs to
// the simulated machine, not to a claim: like a driver's node it stays until the folder is removed.
func (s *Simulated) ensure(node simulatedNode) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	path := s.path(node)
	major, minor, err := host("/").charDevice(path)
	if err == nil && int(major) == s.major && int(minor) == node.minor {
		return nil
	}
	if err := os.RemoveAll(path); err != nil {
		return fmt.Errorf("replace device node: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("make the folder for simulated device nodes: %w", err)
	}
	if err := s.mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(uint32(s.major), uint32(node.minor)))); err != nil {
		return fmt.Errorf("make device node %s: %w", path, err)
	}
	// mknod obeys the umask; containers that do not run as root open the node too.
	if err := os.Chmod(path, 0o666); err != nil {
		return fmt.Errorf("make device node: %w", err)
	}
	return nil
}

// freeMajor returns the first experimental major that no loaded driver has, by the kernel's list of devices.
func freeMajor(procDevices string) (int, error) {
	file, err := os.Open(procDevices)
	if err != nil {
		return 0, fmt.Errorf("find a free device number: %w", err)
	}
	defer file.Close()
	used := map[int]bool{nvidiaMajor: true}
	scanner := bufio.NewScanner(file)
	for scanner.Scan() {
		// "Block devices:" follows; its numbers are another space, counting them too does no harm.
		if fields := strings.Fields(scanner.Text()); len(fields) == 2 {
			if major, err := strconv.Atoi(fields[0]); err == nil {
				used[major] = true
			}
		}
	}
	if err := scanner.Err(); err != nil {
		return 0, fmt.Errorf("find a free device number: read %s: %w", procDevices, err)
	}
	for _, major := range experimentalMajors {
		if !used[major] {
			return major, nil
		}
	}
	return 0, fmt.Errorf("find a free device number: drivers have all of %v, by %s", experimentalMajors, procDevices)
}
