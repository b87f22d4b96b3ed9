// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hollow

import (
	"fmt"
	"slices"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
)

// Pod is what the containers of a pod would see of their devices.
type Pod struct {
	Namespace, Name string
	// Containers are in the order of the pod's spec, init containers first.
	Containers []Container
}

// Container is what the CDI devices of one container change in it.
type Container struct {
	Name string
	// CDIDevices are the fully qualified names that the plugins returned, for instance "k8s.gpu.nvidia.com/claim=…".
	CDIDevices []string
	// Env are the variables that they set, as "NAME=value".
	Env []string
	// Devices are the device nodes that they add.
	Devices []Device
	// Mounts are the paths in the container that they mount.
	Mounts []string
}

// Device is a device node in a container.
type Device struct {
	Path         string
	Type         string // "c" or "b"
	Major, Minor int64
}

// String is the device's path.
func (d Device) String() string { return d.Path }

// Getenv returns the value of a variable, or "".
func (c Container) Getenv(name string) string {
	for _, entry := range slices.Backward(c.Env) {
		if value, ok := strings.CutPrefix(entry, name+"="); ok {
			return value
		}
	}
	return ""
}

// String lists the changes on one line.
func (c Container) String() string {
	var parts []string
	if len(c.Env) > 0 {
		parts = append(parts, "env "+strings.Join(c.Env, ","))
	}
	if len(c.Devices) > 0 {
		var paths []string
		for _, device := range c.Devices {
			paths = append(paths, device.Path)
		}
		parts = append(parts, "devices "+strings.Join(paths, ","))
	}
	if len(c.Mounts) > 0 {
		parts = append(parts, "mounts "+strings.Join(c.Mounts, ","))
	}
	return strings.Join(parts, "; ")
}

// cdiResolver does what a container runtime does with CDI device names.
type cdiResolver struct {
	folder string
	cache  *cdi.Cache
}

func newCDIResolver(folder string) (*cdiResolver, error) {
	cache, err := cdi.NewCache(cdi.WithSpecDirs(folder), cdi.WithAutoRefresh(false))
	if err != nil {
		return nil, fmt.Errorf("reading CDI specs in %s: %w", folder, err)
	}
	return &cdiResolver{folder: folder, cache: cache}, nil
}

// resolve applies the devices to an empty container. It fails as a runtime's creation of the container would: when a device is not
// defined by any valid spec in the folder.
func (r *cdiResolver) resolve(name string, devices []string) (Container, error) {
	c := Container{Name: name, CDIDevices: devices}
	if len(devices) == 0 {
		return c, nil
	}
	// Errors of files that define none of our devices are not ours.
	_ = r.cache.Refresh()
	spec := &oci.Spec{}
	if unresolved, err := r.cache.InjectDevices(spec, devices...); err != nil {
		return c, fmt.Errorf("CDI devices %v of container %s, from specs in %s (unresolved: %v; errors in specs: %v): %w",
			devices, name, r.folder, unresolved, r.cache.GetErrors(), err)
	}
	if spec.Process != nil {
		c.Env = spec.Process.Env
	}
	if spec.Linux != nil {
		for _, d := range spec.Linux.Devices {
			c.Devices = append(c.Devices, Device{Path: d.Path, Type: d.Type, Major: d.Major, Minor: d.Minor})
		}
	}
	for _, m := range spec.Mounts {
		c.Mounts = append(c.Mounts, m.Destination)
	}
	return c, nil
}
