// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hold_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/hold"
	"stowage.dev/stowage/pkg/agent/ledger"
)

var (
	first  = ledger.PluginDevice{Resource: "nvidia.com/gpu", ID: "GPU-1"}
	second = ledger.PluginDevice{Resource: "nvidia.com/gpu", ID: "GPU-2"}
)

// The kubelet keeps the names of CDI devices, which have the UID, over updates of the agent: it must never be another one.
func TestTheUIDFollowsFromTheDevice(t *testing.T) {
	if got, want := hold.UID(first), types.UID("b027f857-de59-5dca-94f6-8ea90653ae53"); got != want {
		t.Errorf("UID of %s is %s, nodes have %s", first, got, want)
	}
	seen := map[types.UID]ledger.PluginDevice{}
	for _, device := range []ledger.PluginDevice{first, second, {Resource: "nvidia.com/gpu.shared", ID: "GPU-1"}, {Resource: "nvidia.com/gpu", ID: ""}} {
		if other, ok := seen[hold.UID(device)]; ok {
			t.Errorf("%s and %s have one UID", device, other)
		}
		if seen[hold.UID(device)] = device; ledger.ValidateUID(hold.UID(device)) != nil {
			t.Errorf("UID of %s: %v", device, ledger.ValidateUID(hold.UID(device)))
		}
	}
}

func TestClaim(t *testing.T) {
	claim := hold.Claim("gpu.nvidia.com", "node-1", ledger.PluginDevice{Resource: "nvidia.com/mig-1g.10gb.me", ID: "MIG-1"}, "gpu-0000-1b-00-0-mig-1g10gb-me-6", nil, []types.UID{"a", "b"})
	if problems := validation.IsDNS1123Subdomain(claim.Name); len(problems) > 0 {
		t.Errorf("name %q: %v", claim.Name, problems)
	}
	if got := hold.Of(claim); got != (ledger.PluginDevice{Resource: "nvidia.com/mig-1g.10gb.me", ID: "MIG-1"}) {
		t.Errorf("it stands for %s", got)
	}
	var pods []types.UID
	for _, consumer := range claim.Status.ReservedFor {
		pods = append(pods, consumer.UID)
	}
	if diff := cmp.Diff([]types.UID{"a", "b"}, pods); diff != "" {
		t.Errorf("pods (-want +got):\n%s", diff)
	}
	if result := claim.Status.Allocation.Devices.Results[0]; result.ShareID != nil || result.ConsumedCapacity != nil {
		t.Errorf("a device that nobody shares: %+v", result)
	}
	// A tenant writes annotations.
	claim.Namespace = "tenant"
	if got := hold.Of(claim); got != (ledger.PluginDevice{}) {
		t.Errorf("a claim of a namespace stands for %s", got)
	}
}

// Replicas of one GPU are shares of its device, and told apart by all names that they have.
func TestClaimOfAReplica(t *testing.T) {
	const gpu = "gpu-0000-1b-00-0"
	names, uids, shares := map[string]bool{}, map[types.UID]bool{}, map[types.UID]bool{}
	for n := range 12 {
		of := ledger.PluginDevice{Resource: "nvidia.com/gpu.shared", ID: hold.ReplicaID("GPU-1", n)}
		claim := hold.Claim("gpu.nvidia.com", "node-1", of, gpu, &ledger.Share{MemoryBytes: 20 << 30, ComputePercent: 25, Setup: "MPS"}, []types.UID{"a"})
		if problems := validation.IsDNS1123Subdomain(claim.Name); len(problems) > 0 {
			t.Errorf("name %q: %v", claim.Name, problems)
		}
		result := claim.Status.Allocation.Devices.Results[0]
		memory, compute := result.ConsumedCapacity["memory"], result.ConsumedCapacity["compute"]
		if result.Device != gpu || memory.String() != "20Gi" || compute.String() != "25" || result.ShareID == nil || ledger.ValidateUID(*result.ShareID) != nil {
			t.Fatalf("result %+v", result)
		}
		names[claim.Name], uids[claim.UID], shares[*result.ShareID] = true, true, true
	}
	if len(names) != 12 || len(uids) != 12 || len(shares) != 12 {
		t.Errorf("12 replicas have %d names, %d UIDs, %d shares", len(names), len(uids), len(shares))
	}
	if got := hold.ReplicaID("GPU-1", 3); got != "GPU-1::3" {
		t.Errorf("ID %q: exporters know those of NVIDIA's device plugin", got)
	}
}

// checkpoint is what the kubelet writes (checkpoint.Data in k8s.io/kubernetes/pkg/kubelet/cm/devicemanager) for a pod with an init container and an app container that use the same GPU, and one with two GPUs.
const checkpoint = `{"Data":{"PodDeviceEntries":[` +
	`{"PodUID":"pod-1","ContainerName":"init","ResourceName":"nvidia.com/gpu","DeviceIDs":{"0":["GPU-1"]},"AllocResp":"KjQ="},` +
	`{"PodUID":"pod-1","ContainerName":"app","ResourceName":"nvidia.com/gpu","DeviceIDs":{"0":["GPU-1"]},"AllocResp":"KjQ="},` +
	`{"PodUID":"pod-2","ContainerName":"app","ResourceName":"nvidia.com/gpu","DeviceIDs":{"0":["GPU-2"],"1":["GPU-2","GPU-3"]},"AllocResp":"KjQ="},` +
	`{"PodUID":"pod-3","ContainerName":"app","ResourceName":"example.com/nic","DeviceIDs":{"-1":["GPU-1"]},"AllocResp":"KjQ="}` +
	`],"RegisteredDevices":{"nvidia.com/gpu":["GPU-1","GPU-2"]}},"Checksum":1234}`

func read(t *testing.T, content string) (*hold.Checkpoint, error) {
	t.Helper()
	dir := t.TempDir()
	if content != "" {
		if err := os.WriteFile(filepath.Join(dir, "kubelet_internal_checkpoint"), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return hold.ReadCheckpoint(dir)
}

func TestCheckpointTellsWhichPodsHaveADevice(t *testing.T) {
	c, err := read(t, checkpoint)
	if err != nil {
		t.Fatal(err)
	}
	for device, want := range map[ledger.PluginDevice][]types.UID{
		first:  {"pod-1"},
		second: {"pod-2"},
		{Resource: "nvidia.com/gpu", ID: "GPU-3"}:  {"pod-2"},
		{Resource: "nvidia.com/gpu", ID: "GPU-4"}:  nil,
		{Resource: "example.com/nic", ID: "GPU-1"}: {"pod-3"},
	} {
		if diff := cmp.Diff(want, c.PodsWith(device)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", device, diff)
		}
	}
}

// What is not understood must not be taken for a node on which nobody has a device.
func TestACheckpointThatIsNotUnderstoodIsAnError(t *testing.T) {
	for name, content := range map[string]string{
		"there is none":                        "",
		"it is cut":                            checkpoint[:100],
		"it is of another form":                `{"V3":{"Entries":[]},"Checksum":1}`,
		"its devices are named otherwise":      strings.ReplaceAll(checkpoint, "DeviceIDs", "Devices"),
		"its pods are named otherwise":         strings.ReplaceAll(checkpoint, "PodUID", "Pod"),
		"its resources are named otherwise":    strings.ReplaceAll(checkpoint, "ResourceName", "Resource"),
		"it has no list of what is registered": strings.ReplaceAll(checkpoint, "RegisteredDevices", "Registered"),
		"it is too large":                      checkpoint + strings.Repeat(" ", 16<<20),
	} {
		t.Run(name, func(t *testing.T) {
			if c, err := read(t, content); err == nil || !strings.Contains(err.Error(), "kubelet_internal_checkpoint") {
				t.Errorf("%v, error %v; want one that names the file", c, err)
			}
		})
	}
}

func TestSource(t *testing.T) {
	pod := func(uid types.UID, change func(*corev1.Pod)) corev1.Pod {
		pod := corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: uid}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}
		if change != nil {
			change(&pod)
		}
		return pod
	}
	away := errors.New("away")
	tests := map[string]struct {
		name          string
		pods          []corev1.Pod
		podsErr       error
		checkpointErr error
		want          []types.UID // nil for NotFound
		err           error
	}{
		"its pod runs":                        {pods: []corev1.Pod{pod("other", nil), pod("pod-1", nil)}, want: []types.UID{"pod-1"}},
		"its pod is being deleted":            {pods: []corev1.Pod{pod("pod-1", func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{} })}, want: []types.UID{"pod-1"}},
		"its pod has succeeded":               {pods: []corev1.Pod{pod("pod-1", func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded })}},
		"its pod has failed":                  {pods: []corev1.Pod{pod("pod-1", func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed })}},
		"its pod is gone":                     {pods: []corev1.Pod{pod("pod-2", nil)}},
		"its pod is static, and has a mirror": {pods: []corev1.Pod{pod("mirror", func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "pod-1"} })}, want: []types.UID{"pod-1"}},
		"the API server is away":              {podsErr: away, err: away},
		"the checkpoint cannot be read":       {pods: []corev1.Pod{pod("pod-1", nil)}, checkpointErr: away, err: away},
		"the ledger has no such claim":        {name: "nvidia.com.gpu.gpu-9", pods: []corev1.Pod{pod("pod-1", nil)}},
		"a claim of a namespace has the name": {name: "train", pods: []corev1.Pod{pod("pod-1", nil)}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			records, err := ledger.Open(durable.OS{}, t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			for _, claim := range []ledger.Claim{
				{UID: "a-claim", Namespace: "default", Name: "train"},
				{UID: hold.UID(first), Name: "nvidia.com.gpu.gpu-0", Plugin: first},
			} {
				if err := records.Put(&ledger.Entry{Claim: claim, State: ledger.PrepareCompleted, Devices: []ledger.Device{{Device: "gpu-0", GPU: "gpu-0"}}}); err != nil {
					t.Fatal(err)
				}
			}
			source := &hold.Source{
				Driver: "gpu.nvidia.com", Pool: "node-1", Ledger: records,
				Checkpoint: func() (*hold.Checkpoint, error) {
					if test.checkpointErr != nil {
						return nil, test.checkpointErr
					}
					return read(t, checkpoint)
				},
				Pods: func(context.Context) ([]corev1.Pod, error) { return test.pods, test.podsErr },
			}
			if test.name == "" {
				test.name = "nvidia.com.gpu.gpu-0"
			}
			claim, err := source.Claim(t.Context(), test.name)
			switch {
			case test.err != nil:
				if !errors.Is(err, test.err) || apierrors.IsNotFound(err) {
					t.Errorf("error %v, want %v", err, test.err)
				}
			case test.want == nil:
				if !apierrors.IsNotFound(err) {
					t.Errorf("claim %v, error %v; want that there is none", claim, err)
				}
			case err != nil:
				t.Error(err)
			default:
				want := hold.Claim("gpu.nvidia.com", "node-1", first, "gpu-0", nil, test.want)
				if diff := cmp.Diff(want, claim); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			}
		})
	}
}
