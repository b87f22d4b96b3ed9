// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/devicemetadata"

	"stowage.dev/stowage/pkg/agent/hold"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
)

// told is what a container reads about its devices, by the files' paths in the container, decoded as applications do.
func (n *node) told(devices []ledger.Device) map[string]*metadata.DeviceMetadata {
	n.t.Helper()
	files := map[string]*metadata.DeviceMetadata{}
	for _, mount := range n.container(devices).Mounts {
		if !strings.HasPrefix(mount.Destination, metadata.ContainerDir) {
			continue
		}
		if files[mount.Destination] != nil {
			n.t.Errorf("%s is mounted twice", mount.Destination)
		}
		if !slices.Contains(mount.Options, "ro") {
			n.t.Errorf("%s can be written by the container: %v", mount.Destination, mount.Options)
		}
		file, err := os.Open(mount.Source)
		if err != nil {
			n.t.Fatal(err)
		}
		defer file.Close()
		if info, err := file.Stat(); err != nil || info.Mode() != 0o644 {
			n.t.Errorf("%s: %v, %v: want it readable for containers of any user", mount.Source, info.Mode(), err)
		}
		files[mount.Destination] = &metadata.DeviceMetadata{}
		if err := devicemetadata.DecodeMetadataFromStream(json.NewDecoder(file), files[mount.Destination]); err != nil {
			n.t.Fatal(err)
		}
	}
	return files
}

func TestContainersAreToldWhatTheyHave(t *testing.T) {
	const direct, template = metadata.ContainerDir + "/resourceclaims/train/", metadata.ContainerDir + "/resourceclaimtemplates/gpus/"
	type device struct{ Request, Name, PCIBusID, UUID string }
	tests := map[string]struct {
		claim    *resourceapi.ResourceClaim
		podClaim string
		want     map[string][]device
	}{
		"two requests, one with two GPUs": {
			claim: claim("train", "gpu="+gpu0, "more="+gpu1, "more="+gpu2),
			want: map[string][]device{
				direct + "gpu/gpu.nvidia.com-metadata.json":  {{"gpu", gpu0, "0000:1b:00.0", ""}},
				direct + "more/gpu.nvidia.com-metadata.json": {{"more", gpu1, "0000:43:00.0", ""}, {"more", gpu2, "0000:52:00.0", ""}},
			},
		},
		"a claim of a template": {
			claim:    claim("train", "gpu="+gpu0),
			podClaim: "gpus",
			want:     map[string][]device{template + "gpu/gpu.nvidia.com-metadata.json": {{"gpu", gpu0, "0000:1b:00.0", ""}}},
		},
		"an alternative": {
			claim: claim("train", "gpu/large="+gpu0),
			want:  map[string][]device{direct + "gpu/gpu.nvidia.com-metadata.json": {{"gpu/large", gpu0, "0000:1b:00.0", ""}}},
		},
		"admin access": {
			claim: claim("train", result("watch="+gpu0+"+admin")),
			want:  map[string][]device{direct + "watch/gpu.nvidia.com-metadata.json": {{"watch", gpu0, "0000:1b:00.0", ""}}},
		},
		"a partition that is made": {
			claim: claim("train", "mig="+gpu0+"-mig-1g10gb-0"),
			want:  map[string][]device{direct + "mig/gpu.nvidia.com-metadata.json": {{"mig", gpu0 + "-mig-1g10gb-0", "0000:1b:00.0", "MIG"}}},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			if tc.podClaim != "" {
				tc.claim.Annotations = map[string]string{resourceapi.PodResourceClaimAnnotation: tc.podClaim}
			}
			devices, err := n.manager().Prepare(n.ctx, tc.claim)
			if err != nil {
				t.Fatal(err)
			}
			visible := n.visible(devices)
			got := map[string][]device{}
			for path, file := range n.told(devices) {
				if file.Name != tc.claim.Name || file.Namespace != tc.claim.Namespace || file.UID != tc.claim.UID {
					t.Errorf("%s is about claim %s/%s (%s)", path, file.Namespace, file.Name, file.UID)
				}
				if (file.PodClaimName != nil) != (tc.podClaim != "") || file.PodClaimName != nil && *file.PodClaimName != tc.podClaim {
					t.Errorf("%s: pod's name of the claim %v, want %q", path, file.PodClaimName, tc.podClaim)
				}
				for _, request := range file.Requests {
					for _, d := range request.Devices {
						if d.Driver != driverName || d.Pool != pool {
							t.Errorf("%s: driver %s, pool %s", path, d.Driver, d.Pool)
						}
						uuid := *d.Attributes["uuid"].StringValue
						if !slices.Contains(visible, uuid) {
							t.Errorf("%s: UUID %s, the container has %v", path, uuid, visible)
						}
						if !strings.HasPrefix(uuid, "MIG-") {
							uuid = ""
						} else {
							uuid = "MIG"
						}
						got[path] = append(got[path], device{request.Name, d.Name, *d.Attributes["resource.kubernetes.io/pciBusID"].StringValue, uuid})
					}
				}
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("files (-want +got):\n%s", diff)
			}
		})
	}
}

// A pod with a device of a device plugin has no claim to look for: nothing is written for it, nor mounted.
func TestADeviceOfADevicePluginHasNoMetadata(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	for _, gpu := range bothGPUs {
		devices := n.prepared(m, hold.Claim(driverName, pool, ledger.PluginDevice{Resource: "nvidia.com/gpu", ID: gpu}, gpu, nil, []types.UID{"pod"}))
		if told := n.told(devices); len(told) > 0 || !n.empty(n.metadataDir()) {
			t.Errorf("%s: the container has the files %v", gpu, told)
		}
		of := ledger.PluginDevice{Resource: "nvidia.com/gpu", ID: gpu}
		if _, record := n.recordOf(hold.UID(of)); record.Entry.Claim.Plugin != of {
			t.Errorf("the record is of %+v, want %+v", record.Entry.Claim, of)
		}
	}
}

// Text of a claim becomes part of paths and CDI names: what could leave them is refused by its field, and nothing is written.
func TestNamesOfAClaimDoNotLeaveTheirPaths(t *testing.T) {
	annotated := func(value string) func(*resourceapi.ResourceClaim) {
		return func(c *resourceapi.ResourceClaim) {
			c.Annotations = map[string]string{resourceapi.PodResourceClaimAnnotation: value}
		}
	}
	request := func(value string) func(*resourceapi.ResourceClaim) {
		return func(c *resourceapi.ResourceClaim) { c.Status.Allocation.Devices.Results[0].Request = value }
	}
	const annotation, result = "metadata.annotations[resource.kubernetes.io/pod-claim-name]: ", "status.allocation.devices.results[0].request: "
	for name, tc := range map[string]struct {
		change func(*resourceapi.ResourceClaim)
		want   string
	}{
		"the pod's name for it, as a path":      {annotated("../../etc"), annotation + `"../../etc"`},
		"the pod's name for it, with a dot":     {annotated(".."), annotation + `".."`},
		"the pod's name for it, of two labels":  {annotated("a.b"), annotation + `"a.b"`},
		"the pod's name for it, empty":          {annotated(""), annotation + `""`},
		"the pod's name for it, with a newline": {annotated("a\nb"), annotation + `"a\nb"`},
		"the pod's name for it, too long":       {annotated(strings.Repeat("a", 64)), annotation},
		"its name":                              {func(c *resourceapi.ResourceClaim) { c.Name = "../x" }, `metadata.name: "../x"`},
		"its UID, before its devices are looked up": {func(c *resourceapi.ResourceClaim) {
			c.UID, c.Status.Allocation.Devices.Results[0].Device = "../x", "none"
		}, `claim UID "../x"`},
		"a request":                {request(".."), result + `".."`},
		"a subrequest":             {request("gpu/.."), result + `".."`},
		"a request that is a path": {request("/etc"), result + `""`},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			before := n.state()
			c := claim("train", "gpu="+gpu0)
			tc.change(c)
			if _, err := n.manager().Prepare(n.ctx, c); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one with %s", err, tc.want)
			}
			if diff := cmp.Diff(before, n.state()); diff != "" {
				t.Errorf("(-before +now):\n%s", diff)
			}
		})
	}
}

// A container that is restarted is mounted the file again, also when the driver has gone meanwhile.
func TestDeviceMetadataIsPutBack(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	devices, err := m.Prepare(n.ctx, claim("train", "gpu="+gpu0))
	if err != nil {
		t.Fatal(err)
	}
	before := n.state()
	file := filepath.Join(n.metadataDir(), "train-uid", "gpu.json")
	reconcile := func() error {
		n.hardware.broken[gpu0] = nvml.ErrDriverNotLoaded
		defer delete(n.hardware.broken, gpu0)
		sum, err := m.Reconcile(n.ctx)
		if err == nil && sum.Restored != 1 {
			err = fmt.Errorf("%+v: want one claim restored", sum)
		}
		return err
	}
	prepareAgain := func() error {
		_, err := m.Prepare(n.ctx, claim("train", "gpu="+gpu0))
		return err
	}
	remove := func() error { return os.Remove(file) }
	for name, tc := range map[string]struct{ spoil, repair func() error }{
		"removed":         {remove, reconcile},
		"changed":         {func() error { return os.WriteFile(file, []byte("{}"), 0o600) }, reconcile},
		"with its folder": {func() error { return os.RemoveAll(n.metadataDir()) }, reconcile},
		"by the next pod": {remove, prepareAgain},
	} {
		t.Run(name, func(t *testing.T) {
			if err := tc.spoil(); err != nil {
				t.Fatal(err)
			}
			if err := tc.repair(); err != nil {
				t.Error(err)
			}
			n.told(devices)
			if diff := cmp.Diff(before, n.state()); diff != "" {
				t.Errorf("(-before +now):\n%s", diff)
			}
		})
	}
}

// An agent from before there was metadata has prepared one claim. Of another one, which it has unprepared, it has left the files.
func TestDeviceMetadataOverUpdates(t *testing.T) {
	n := newNode(t)
	train := claim("train", "gpu="+gpu0)
	if _, err := n.manager().Prepare(n.ctx, train); err != nil {
		t.Fatal(err)
	}
	want := n.state()
	records, record := n.recordOf(train.UID)
	record.Entry.Metadata = nil
	if err := records.Put(record.Entry); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(n.metadataDir(), "train-uid"), filepath.Join(n.metadataDir(), "other-uid")); err != nil {
		t.Fatal(err)
	}

	m := n.manager()
	if _, err := m.Recover(n.ctx); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(n.metadataDir()); err != nil || len(left) != 0 {
		t.Errorf("left after the start: %v, %v", left, err)
	}
	devices, err := m.Prepare(n.ctx, train)
	if err != nil {
		t.Fatal(err)
	}
	if told := n.told(devices); len(told) != 1 {
		t.Errorf("files: %v", told)
	}
	if diff := cmp.Diff(want, n.state()); diff != "" {
		t.Errorf("after the next call (-want +got):\n%s", diff)
	}
}

// The ledger's record is lost, the CDI specification is not: a container that is restarted still gets all of it.
func TestDeviceMetadataStaysWithItsSpecification(t *testing.T) {
	n := newNode(t)
	devices, err := n.manager().Prepare(n.ctx, claim("train", "gpu="+gpu0))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(n.claimsDir()); err != nil {
		t.Fatal(err)
	}
	m := n.manager()
	if _, err := m.Recover(n.ctx); err != nil {
		t.Fatal(err)
	}
	if told := n.told(devices); len(told) != 1 {
		t.Errorf("files: %v", told)
	}
	if err := m.RemoveStray(n.ctx, "train-uid"); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Reconcile(n.ctx); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(n.metadataDir()); err != nil || len(left) != 0 {
		t.Errorf("left without a specification: %v, %v", left, err)
	}
}
