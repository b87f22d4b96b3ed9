// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"tags.cncf.io/container-device-interface/specs-go"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare/internal/steps"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/agent/vfio"
)

// describer tells containers of a claim's devices, which are made.
type describer struct {
	driver  string
	backend cdi.Backend
	pci     steps.PCI
	daemons sharing.Daemons
	files   steps.Files
}

// spec returns the CDI specification for the claim's devices.
func (d *describer) spec(ctx context.Context, j *job) ([]byte, error) {
	devices := make([]cdi.Device, 0, len(j.entry.Devices))
	for i, device := range j.entry.Devices {
		gpu := j.targets[i].GPU
		gpu.UUID = device.UUID
		described := cdi.Device{Request: device.Request, Name: device.Device, GPU: gpu}
		switch {
		case device.Passthrough:
			var err error
			if described.Nodes, err = d.nodes(&j.targets[i], j.settings[i].VFIO); err != nil {
				return nil, fmt.Errorf("claim %s, request %s, device %s: %w", j.entry.Claim, device.Request, device.Device, err)
			}
		case device.Share != nil:
			var err error
			if described.Extra, err = d.shareEdits(j, i); err != nil {
				return nil, err
			}
			described.Share = *device.ShareID
		case j.settings[i].Strategy == config.MPS && !device.AdminAccess:
			described.Extra = d.daemons.Edits(string(j.entry.Claim.UID))
		}
		if mount := d.mount(j, i); mount != nil {
			described.Mounts = append(described.Mounts, mount)
		}
		devices = append(devices, described)
	}
	spec, err := cdi.BuildSpec(ctx, d.backend, j.entry.Claim.UID, devices)
	if err != nil {
		return nil, fmt.Errorf("claim %s: %w", j.entry.Claim, err)
	}
	return cdi.Encode(spec)
}

// patient waits no longer than that for what a backend finds out by asking NVML, which cannot be cancelled.
type patient struct {
	cdi.Backend
	timeout time.Duration
}

// CommonEdits implements cdi.Backend.
func (p patient) CommonEdits(ctx context.Context) (*specs.ContainerEdits, error) {
	return p.wait(ctx, p.Backend.CommonEdits)
}

// ControlNodes implements cdi.Backend.
func (p patient) ControlNodes(ctx context.Context) error {
	_, err := p.wait(ctx, func(ctx context.Context) (*specs.ContainerEdits, error) { return nil, p.Backend.ControlNodes(ctx) })
	return err
}

// GPUEdits implements cdi.Backend.
func (p patient) GPUEdits(ctx context.Context, gpu cdi.GPU) (*specs.ContainerEdits, error) {
	return p.wait(ctx, func(ctx context.Context) (*specs.ContainerEdits, error) { return p.Backend.GPUEdits(ctx, gpu) })
}

func (p patient) wait(ctx context.Context, f func(context.Context) (*specs.ContainerEdits, error)) (*specs.ContainerEdits, error) {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	// Who is asked knows what it waits for, a module that is being loaded for example, and has the time to say so.
	asked, cancelAsked := context.WithTimeout(ctx, p.timeout-p.timeout/10)
	defer cancelAsked()
	type answer struct {
		edits *specs.ContainerEdits
		err   error
	}
	answers := make(chan answer, 1)
	go func() {
		edits, err := f(asked)
		answers <- answer{edits, err}
	}()
	select {
	case a := <-answers:
		return a.edits, a.err
	case <-ctx.Done():
		return nil, fmt.Errorf("the driver does not answer: %w", ctx.Err())
	}
}

// nodes are those that a virtual machine's container gets for the GPU, by their names below /dev. All functions of the group must be
// with vfio-pci: otherwise the virtual machine could not open it.
func (d *describer) nodes(target *Target, settings config.VFIO) ([]string, error) {
	sysfs, err := d.pci.Kernel()
	if err != nil {
		return nil, err
	}
	group, err := vfio.GroupOf(sysfs, target.GPU.PCIBusID)
	if err != nil {
		return nil, err
	}
	byFunction := settings.PreferIOMMUFD && vfio.HasIOMMUFD(sysfs)
	paths := []string{group.Node()}
	api := vfio.ContainerNode
	if byFunction {
		paths, api = nil, vfio.IOMMUFDNode
	}
	for _, f := range group.Functions {
		if f.Driver != vfio.Driver {
			return nil, fmt.Errorf("PCI function %s of IOMMU group %s has the driver %q, not %s", f.Address, group.ID, f.Driver, vfio.Driver)
		}
		if !byFunction {
			continue
		}
		node, err := vfio.FunctionNode(sysfs, f.Address)
		if err != nil {
			return nil, err
		}
		paths = append(paths, node)
	}
	if !settings.NoAPIDevice {
		paths = append(paths, api)
	}
	for i := range paths {
		paths[i] = strings.TrimPrefix(paths[i], "/dev/")
	}
	return paths, nil
}

// Names of variables that the MPS server reads from its clients' environments (NVIDIA's documentation of the Multi-Process
// Service, "Environment Variables").
const (
	mpsMemoryEnv  = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
	mpsPercentEnv = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
)

// shareEdits tell a container what it may use, and, under MPS, hold each of its processes to it.
func (d *describer) shareEdits(j *job, i int) (*specs.ContainerEdits, error) {
	device, settings := &j.entry.Devices[i], j.settings[i]
	allowed := j.granted(device.Request, device.GPU)
	edits := &specs.ContainerEdits{Env: cdi.ShareEnv(device.Device, allowed.memoryMiB, allowed.percent)}
	if settings.Strategy != config.MPS {
		return edits, nil
	}
	limit, err := mpsLimit(settings.MPS, device, allowed)
	if err != nil {
		return nil, fmt.Errorf("claim %s, request %s: %w", j.entry.Claim, device.Request, err)
	}
	daemon := d.daemons.Edits(device.GPU)
	edits.Env, edits.Mounts = append(edits.Env, daemon.Env...), daemon.Mounts
	// The daemon serves this GPU alone, so it is its clients' number 0.
	edits.Env = append(edits.Env, fmt.Sprintf("%s=0=%dM", mpsMemoryEnv, limit.memoryMiB))
	if limit.percent > 0 {
		edits.Env = append(edits.Env, fmt.Sprintf("%s=%d", mpsPercentEnv, limit.percent))
	}
	return edits, nil
}

// metadata returns the content of the claim's files by their requests' names. They are mounted where
// k8s.io/dynamic-resource-allocation/api/metadata says. Of a device plugin's device there are none: its pods have no claim to look for.
func (d *describer) metadata(j *job) (map[string]json.RawMessage, error) {
	if j.entry.Claim.Plugin != (ledger.PluginDevice{}) {
		return nil, nil
	}
	described := map[string]*v1beta1.DeviceMetadata{}
	for i, device := range j.entry.Devices {
		request := resourceclaim.BaseRequestRef(device.Request)
		of := described[request]
		if of == nil {
			of = &v1beta1.DeviceMetadata{
				TypeMeta: metav1.TypeMeta{APIVersion: v1beta1.SchemeGroupVersion.String(), Kind: "DeviceMetadata"},
				ObjectMeta: metav1.ObjectMeta{
					Namespace: j.entry.Claim.Namespace, Name: j.entry.Claim.Name, UID: j.entry.Claim.UID, Generation: 1,
				},
				Requests: []v1beta1.DeviceMetadataRequest{{Name: device.Request}},
			}
			if j.podClaim != "" {
				of.PodClaimName = &j.podClaim
			}
			described[request] = of
		}
		attributes := maps.Clone(j.targets[i].Attributes)
		if device.Partition != nil {
			// A partition that is made for the claim is published before it has one.
			attributes[discovery.AttributeUUID] = resourceapi.DeviceAttribute{StringValue: &device.UUID}
		}
		of.Requests[0].Devices = append(of.Requests[0].Devices, v1beta1.Device{
			Driver: d.driver, Pool: device.Pool, Name: device.Device, Attributes: attributes,
		})
	}
	encoded := make(map[string]json.RawMessage, len(described))
	for request, of := range described {
		data, err := json.Marshal(of)
		if err != nil {
			return nil, fmt.Errorf("claim %s, request %s: encode device metadata: %w", j.entry.Claim, request, err)
		}
		encoded[request] = data
	}
	return encoded, nil
}

// mount shows the file to the containers that get the claim's i-th device, if that is the first one of its request:
// who gets one device of a request gets all of them.
func (d *describer) mount(j *job, i int) *specs.Mount {
	request := resourceclaim.BaseRequestRef(j.entry.Devices[i].Request)
	first := slices.IndexFunc(j.entry.Devices, func(d ledger.Device) bool { return resourceclaim.BaseRequestRef(d.Request) == request })
	if first != i || j.entry.Claim.Plugin != (ledger.PluginDevice{}) {
		return nil
	}
	path := metadata.ResourceClaimFilePath(d.driver, j.entry.Claim.Name, request)
	if j.podClaim != "" {
		path = metadata.ResourceClaimTemplateFilePath(d.driver, j.podClaim, request)
	}
	return &specs.Mount{
		HostPath:      d.files.MetadataPath(j.entry.Claim.UID, request),
		ContainerPath: path,
		Options:       []string{"ro", "nosuid", "nodev", "bind"},
	}
}
