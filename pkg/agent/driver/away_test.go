// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/reconcile"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/nvmlsim"
)

func init() {
	// The default handlers also slow down who reports errors quickly, by a clock that a bubble of synctest sets back by decades.
	utilruntime.ErrorHandlers = utilruntime.ErrorHandlers[:1]
}

// apiServer is a fake one that can be away.
type apiServer struct {
	*fake.Clientset
	away atomic.Bool
}

var errAway = errors.New("the API server is away")

func newAPIServer(objects ...runtime.Object) *apiServer {
	a := &apiServer{Clientset: NewClientset(objects...)}
	a.PrependReactor("*", "*", func(clienttesting.Action) (bool, runtime.Object, error) { return a.away.Load(), nil, errAway })
	a.PrependWatchReactor("*", func(clienttesting.Action) (bool, watch.Interface, error) { return a.away.Load(), nil, errAway })
	return a
}

func allocatedClaim(name, device string) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name + "-uid")}}
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{{Request: "gpu", Driver: Name, Pool: "node-1", Device: device}},
	}}
	return claim
}

// TestTheAPIServerIsAwayForTenMinutes: unprepare and health do not need it, running pods keep what they have, nothing is concluded from
// its silence, and soon after it is back it knows everything.
func TestTheAPIServerIsAwayForTenMinutes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "t4")
		gpus := []string{"gpu-0000-00-1b-0", "gpu-0000-00-1c-0"}
		stays, leaves := allocatedClaim("stays", gpus[0]), allocatedClaim("leaves", gpus[1])
		api := newAPIServer(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "node-uid"}}, stays, leaves)
		agent := r.agent(ctx, api)
		p := agent.newPlugin(func(error) {})
		stop := background(ctx, agent.watch)

		results, err := p.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{stays, leaves})
		if err != nil || results["stays-uid"].Err != nil || results["leaves-uid"].Err != nil {
			t.Fatalf("prepare: %v, %v", results, err)
		}
		time.Sleep(10 * time.Second)

		api.away.Store(true)
		time.Sleep(3 * time.Minute)
		gone, err := p.UnprepareResourceClaims(ctx, []kubeletplugin.NamespacedObject{{UID: "leaves-uid"}})
		if err != nil || gone["leaves-uid"] != nil {
			t.Errorf("unprepare: %v, %v", gone, err)
		}
		r.do(&nvmlsim.SetRecovery{GPU: "0", Action: nvmlsim.RecoveryReset})
		time.Sleep(7 * time.Minute)
		healths := map[string]kubeletplugin.HealthStatus{}
		for _, device := range p.health() {
			healths[device.DeviceName] = device.Health
		}
		if healths[gpus[0]] != kubeletplugin.HealthStatusUnhealthy || healths[gpus[1]] != kubeletplugin.HealthStatusHealthy {
			t.Errorf("health without an API server: %v", healths)
		}
		files, err := filepath.Glob(filepath.Join(r.state, "cdi", "*"))
		if err != nil || len(files) != 1 || !strings.Contains(files[0], "stays-uid") {
			t.Errorf("CDI files %v, %v; want that of the claim that stays", files, err)
		}
		records, err := agent.reporter.ledger.Records()
		if err != nil || len(records) != 1 || records[0].UID != "stays-uid" {
			t.Errorf("ledger %v, %v; want the claim that stays", records, err)
		}

		if got, want := published(t, agent.opts.Hardware)[0], gpus[0]+" recovery-action=gpu-reset:NoSchedule"; got != want {
			t.Errorf("to be published %q, want %q", got, want)
		}

		api.away.Store(false)
		time.Sleep(2 * time.Minute)
		claim, err := api.ResourceV1().ResourceClaims("default").Get(ctx, "stays", metav1.GetOptions{})
		if err != nil || len(claim.Status.Devices) != 1 {
			t.Fatalf("claim %v, %v", claim, err)
		}
		if c := meta.FindStatusCondition(claim.Status.Devices[0].Conditions, ConditionHealthy); c == nil || c.Status != metav1.ConditionFalse {
			t.Errorf("condition after a minute: %v", c)
		}
		stop()
	})
}

// TestLeftoversAreReleasedByTheAgent: a claim was deleted behind the kubelet's back, which has forgotten it.
func TestLeftoversAreReleasedByTheAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "t4")
		const gpu = "gpu-0000-00-1b-0"
		claim := allocatedClaim("left", gpu)
		api := newAPIServer(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "node-uid"}}, claim)
		agent := r.agent(ctx, api)
		agent.registered.Store(time.Now().Add(-time.Hour).UnixNano())
		p := agent.newPlugin(func(error) {})
		stop := background(ctx, agent.watch)
		time.Sleep(10 * time.Second)
		if results, _ := p.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{claim}); results["left-uid"].Err != nil {
			t.Fatal(results["left-uid"].Err)
		}
		held := func() bool { return HeldInLedger(r.state)(gpu) }
		r.do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 42, Kind: nvmlsim.ProcessCompute, MemoryMiB: 100}})
		if err := api.ResourceV1().ResourceClaims("default").Delete(ctx, "left", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Minute)
		if got := published(t, agent.opts.Hardware)[0]; !held() || got != gpu+" occupied=left-uid:NoSchedule" {
			t.Errorf("while a process of a pod that was deleted by force runs: held %v, published %q", held(), got)
		}
		r.do(&nvmlsim.RemoveProcess{GPU: "0", PID: 42})
		time.Sleep(3 * time.Minute)
		if got := published(t, agent.opts.Hardware)[0]; held() || got != gpu {
			t.Errorf("after the process has ended: held %v, published %q", held(), got)
		}
		stop()
	})
}

// TestACDIFileWhoseRecordIsLost stays as long as anybody may use it, and goes when nobody does; files of others are nobody's business.
func TestACDIFileWhoseRecordIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "t4")
		const gpu = "gpu-0000-00-1b-0"
		claim := allocatedClaim("lost", gpu)
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "pod", UID: "pod-uid"}, Status: corev1.PodStatus{Phase: corev1.PodPending}}
		pod.Spec.NodeName = "node-1"
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: new("lost")}}
		api := newAPIServer(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "node-uid"}}, claim, pod)
		agent := r.agent(ctx, api)
		agent.registered.Store(time.Now().Add(-time.Hour).UnixNano())
		p := agent.newPlugin(func(error) {})
		if results, _ := p.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{claim}); results["lost-uid"].Err != nil {
			t.Fatal(results["lost-uid"].Err)
		}
		records, err := filepath.Glob(filepath.Join(prepare.LedgerDir(r.state), "*"))
		if err != nil || len(records) == 0 {
			t.Fatalf("records %v, %v", records, err)
		}
		for _, record := range records {
			if err := os.Remove(record); err != nil {
				t.Fatal(err)
			}
		}
		const foreign = `{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[{"name":"0","containerEdits":{"env":["X=y"]}}]}`
		cdiDir := filepath.Join(r.state, "cdi")
		others := []string{"k8s.gpu.nvidia.com-claim_x-uid.yaml", "nvidia.com-gpu.json", "nvidia.com-gpu.json.tmp"}
		for _, name := range others {
			writeFile(t, filepath.Join(cdiDir, name), foreign)
		}
		files := func() []string {
			entries, err := os.ReadDir(cdiDir)
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, entry := range entries {
				names = append(names, entry.Name())
			}
			return names
		}
		with := append([]string{"k8s.gpu.nvidia.com-claim_lost-uid.json"}, others...)
		want := func(what string, want []string) {
			t.Helper()
			if diff := cmp.Diff(want, files(), cmpopts.SortSlices(strings.Compare)); diff != "" {
				t.Errorf("%s: files (-want +got):\n%s", what, diff)
			}
		}

		// The agent starts anew: it knows nothing of the claim, and its pod is still there.
		if _, err := agent.claims.Recover(ctx); err != nil {
			t.Fatal(err)
		}
		stop := background(ctx, agent.watch)
		time.Sleep(5*time.Minute + 30*time.Second) // between two looks
		want("while its pod has not ended", with)
		r.do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 42, Kind: nvmlsim.ProcessCompute, MemoryMiB: 100}})
		if err := errors.Join(api.CoreV1().Pods("default").Delete(ctx, "pod", metav1.DeleteOptions{}), api.ResourceV1().ResourceClaims("default").Delete(ctx, "lost", metav1.DeleteOptions{})); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Minute)
		want("while a process of a pod that was deleted by force runs", with)
		r.do(&nvmlsim.RemoveProcess{GPU: "0", PID: 42})
		time.Sleep(time.Minute)
		want("after one reading", with)
		time.Sleep(time.Minute)
		want("when nobody uses it", others)
		stop()
	})
}

// agent is one on the rig, which has looked at the GPUs. Nothing runs yet, and nothing is published: the library's controller spins when the
// time stands still, as it does in a bubble.
func (r *rig) agent(ctx context.Context, api *apiServer) *Agent {
	r.t.Helper()
	agent := r.blindAgent(ctx, api)
	if _, err := agent.opts.Hardware.Discover(ctx); err != nil {
		r.t.Fatal(err)
	}
	return agent
}

// blindAgent has not looked for GPUs.
func (r *rig) blindAgent(ctx context.Context, api *apiServer) *Agent {
	r.t.Helper()
	proc := filepath.Join(r.state, "proc")
	if err := errors.Join(os.MkdirAll(proc, 0o700), os.WriteFile(filepath.Join(proc, "devices"), nil, 0o600)); err != nil {
		r.t.Fatal(err)
	}
	backend, err := cdi.NewSimulated(ctx, cdi.SimulatedOptions{DevRoot: filepath.Join(r.state, "dev"), ProcRoot: proc, Mknod: func(string, uint32, int) error { return unix.EPERM }})
	if err != nil {
		r.t.Fatal(err)
	}
	hardware := r.hardware()
	hardware.opts.Held = HeldInLedger(r.state)
	agent, err := New(Options{
		NodeName: "node-1", Client: api, KubeletRoot: r.state, StateDir: r.state, CDIDir: filepath.Join(r.state, "cdi"), Backend: backend, Hardware: hardware,
		Tools: sharing.NewSimulated(r.machine), Sharing: r.sharing, Shares: r.shares,
		Kubelet: Kubelet{
			Pods: func(context.Context) ([]reconcile.KubeletPod, error) {
				time.Sleep(r.kubeletTakes)
				return nil, nil
			},
			Devices: func(_ context.Context, ofPods bool) ([]ledger.PluginDevice, error) {
				switch {
				case r.devices != nil:
					return r.devices(ofPods)
				case ofPods:
					r.listed.Add(1)
					return append(slices.Clone(r.pluginDevices), r.podDevices...), r.pluginDevicesErr
				}
				return r.pluginDevices, r.pluginDevicesErr
			},
		},
	})
	if err != nil {
		r.t.Fatal(err)
	}
	if err := agent.claims.MakeFolders(); err != nil { // as Run does
		r.t.Fatal(err)
	}
	return agent
}
