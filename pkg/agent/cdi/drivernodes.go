package cdi

import (
	"cmp"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"
)

// nvcdi leaves out, with a warning, what it does not find. A container without one of the nodes below starts, and
// finds out that CUDA does not work.

// controlNodes are opened by whatever uses CUDA.
var controlNodes = []string{"/dev/nvidiactl", "/dev/nvidia-uvm"}

const (
	migPrefix = "MIG-"
	// capsFolder has a node for each GPU instance and for each compute instance. Who may open both may use the MIG
	// device (NVIDIA's MIG user guide, "Device Nodes and Capabilities").
	capsFolder = "/dev/nvidia-caps"
	migCaps    = 2
)

// requireNodes names the nodes that are not among these.
func requireNodes(nodes []*specs.DeviceNode, wanted ...string) error {
	var missing []string
	for _, name := range wanted {
		if !slices.ContainsFunc(nodes, func(n *specs.DeviceNode) bool { return n.Path == name }) {
			missing = append(missing, name)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("there is no %s: load the modules nvidia and nvidia-uvm and make their device nodes, as nvidia-modprobe -u -c <minor> does", strings.Join(missing, " and no "))
}

// requireGPU checks the nodes of a GPU or of a MIG device.
func requireGPU(nodes []*specs.DeviceNode, gpu GPU) error {
	if err := requireNodes(nodes, "/dev/nvidia"+strconv.Itoa(gpu.Minor)); err != nil {
		return err
	}
	if !strings.HasPrefix(gpu.UUID, migPrefix) {
		return nil
	}
	var caps []string
	for _, node := range nodes {
		if path.Dir(node.Path) == capsFolder {
			caps = append(caps, path.Base(node.Path))
		}
	}
	if len(caps) != migCaps {
		return fmt.Errorf("in %s there is [%s], and a MIG device needs two nodes there, of its GPU instance and of its compute instance: make them, as nvidia-modprobe -f <capability> does", capsFolder, strings.Join(caps, " "))
	}
	return nil
}

// letEverybodyOpen gives the driver's nodes modes by which a container need not run as root to use its GPU, whatever an
// administrator wants of processes of the host (the driver's parameter NVreg_DeviceFileMode): who may use the GPU is said by
// the claim. Nodes are made anew for each container, with the mode that is asked for. Nodes for rendering are open to the
// group that nvcdi adds to the container.
//
// It also says what kind of node it is, and of which path, so that it can be checked from where the host has another root.
func letEverybodyOpen(nodes []*specs.DeviceNode) {
	for _, node := range nodes {
		if node.Major != 0 {
			node.Type, node.HostPath = "c", cmp.Or(node.HostPath, node.Path)
		}
		var mode fs.FileMode
		switch {
		case path.Dir(node.Path) == capsFolder:
			mode = 0o444 // all that is done with it is to open it
		case strings.HasPrefix(node.Path, "/dev/nvidia"):
			mode = 0o666
		default:
			continue
		}
		if node.FileMode != nil {
			mode |= node.FileMode.Perm()
		}
		node.FileMode = &mode
	}
}
