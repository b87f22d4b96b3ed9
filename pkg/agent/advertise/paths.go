// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package advertise

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/podresources"
)

// Path is a way to offer a GPU.
type Path string

// The paths.
const (
	DRA          Path = "dra"
	DevicePlugin Path = "device-plugin"
	None         Path = "none"
)

var paths = []Path{DRA, DevicePlugin, None}

// gpuNames are the ways to name a GPU that stay the same over reboots.
var gpuNames = regexp.MustCompile(`^(([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])|gpu(-[0-9a-f]+){4,5})$`)

// Paths of a node's GPUs. The zero value offers all of them by claims.
type Paths struct {
	otherwise Path
	// named GPUs, in lower case.
	named map[string]Path
}

// Parse reads a list with commas between: the path of all GPUs, and NAME=PATH for single ones, by UUID, PCI address or device name:
// "dra,0000:1b:00.0=device-plugin". Without a path of all it is DRA. The error names the item.
func Parse(list string) (Paths, error) {
	p := Paths{named: map[string]Path{}}
	for item := range strings.SplitSeq(list, ",") {
		name, word, single := strings.Cut(item, "=")
		if !single {
			name, word = "", item
		}
		path := Path(word)
		if !slices.Contains(paths, path) {
			return Paths{}, fmt.Errorf("%q: %q is no path: want %s, %s or %s", item, word, DRA, DevicePlugin, None)
		}
		if !single {
			if p.otherwise != "" {
				return Paths{}, fmt.Errorf("%q: there is a path for all GPUs already, %s", item, p.otherwise)
			}
			p.otherwise = path
			continue
		}
		name = strings.ToLower(name)
		if !gpuNames.MatchString(name) {
			return Paths{}, fmt.Errorf("%q: want a GPU by its UUID (GPU-…), its PCI address (0000:1b:00.0) or its name (gpu-0000-1b-00-0)", item)
		}
		if !strings.HasPrefix(name, "gpu") {
			name = podresources.KernelAddress(name)
		}
		if before, ok := p.named[name]; ok {
			return Paths{}, fmt.Errorf("%q: that GPU has a path already, %s", item, before)
		}
		p.named[name] = path
	}
	return p, nil
}

// Equal tells whether all GPUs have the same paths.
func (p *Paths) Equal(q *Paths) bool {
	return cmp.Or(p.otherwise, DRA) == cmp.Or(q.otherwise, DRA) && maps.Equal(p.named, q.named)
}

// String is the list that [Parse] reads, in order.
func (p *Paths) String() string {
	list := []string{string(cmp.Or(p.otherwise, DRA))}
	for _, name := range slices.Sorted(maps.Keys(p.named)) {
		list = append(list, name+"="+string(p.named[name]))
	}
	return strings.Join(list, ",")
}

// Of is the GPU's path. One that is named in two ways with two paths has none: what was meant is not known.
func (p *Paths) Of(gpu *discovery.GPU) Path {
	var found Path
	for _, name := range []string{gpu.Name, gpu.PCIBusID, strings.ToLower(gpu.UUID)} {
		switch path := p.named[name]; {
		case path == "" || name == "":
		case found != "" && found != path:
			return None
		default:
			found = path
		}
	}
	switch {
	case found != "":
		return found
	case p.otherwise != "":
		return p.otherwise
	}
	return DRA
}

// On are the paths of the node's GPUs, by their names. A GPU that only vfio-pci has seen has no UUID. If the list names one by a UUID that
// the node does not have, and with another path, it may be that GPU, and then it has none.
func (p *Paths) On(n *discovery.Node) map[string]Path {
	var missing []Path
	for _, name := range p.Unknown(n) {
		if isUUID(name) {
			missing = append(missing, p.named[name])
		}
	}
	paths := map[string]Path{}
	for i := range n.GPUs {
		gpu := &n.GPUs[i]
		path := p.Of(gpu)
		isNamed := p.named[gpu.Name] != "" || p.named[gpu.PCIBusID] != ""
		if gpu.Unseen() && !isNamed && slices.ContainsFunc(missing, func(of Path) bool { return of != path }) {
			path = None
		}
		paths[gpu.Name] = path
	}
	return paths
}

// isUUID tells a UUID from the name of a device.
func isUUID(name string) bool {
	return strings.HasPrefix(name, "gpu-") && strings.Count(name, "-") == 5
}

// ClaimsOnly tells that no GPU can have another path than DRA.
func (p *Paths) ClaimsOnly() bool {
	for _, path := range p.named {
		if path != DRA {
			return false
		}
	}
	return p.otherwise == "" || p.otherwise == DRA
}

// Named is the path of the GPU that the list names so, by PCI address or device name, or, with an empty name, of all that it does not
// name. It is empty where the list says nothing.
func (p *Paths) Named(name string) Path {
	if name == "" {
		return p.otherwise
	}
	name = strings.ToLower(name)
	if !strings.HasPrefix(name, "gpu") {
		name = podresources.KernelAddress(name)
	}
	return p.named[name]
}

// Unknown are the names of GPUs that the node does not have now, in order.
func (p *Paths) Unknown(n *discovery.Node) []string {
	var unknown []string
	for name := range p.named {
		if !slices.ContainsFunc(n.GPUs, func(g discovery.GPU) bool {
			return name == g.Name || name == g.PCIBusID || name == strings.ToLower(g.UUID)
		}) {
			unknown = append(unknown, name)
		}
	}
	slices.Sort(unknown)
	return unknown
}
