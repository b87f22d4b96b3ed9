// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	fwk "k8s.io/kube-scheduler/framework"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"
)

// PreBind: finalizer, allocation and reservation are there when the pod has its node.
func TestBoundPodHasItsClaimWritten(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	startScheduler(t, w.name, schedulerSetup{})
	w.addNode("a", gpus(h100, 2)...)
	claim := spec(w.exactly("gpu", 1))
	claim.Devices.Config = []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: opaque(w.driver, `{"sharing":"none"}`)}}
	w.addClaim("wanted", claim)
	pod := w.addPod("pod", withClaim("wanted"))
	w.awaitBoundTo("pod", "a")

	got := w.claim("wanted")
	want := resourceapi.ResourceClaimStatus{
		Allocation: &resourceapi.AllocationResult{
			Devices: resourceapi.DeviceAllocationResult{
				Results: []resourceapi.DeviceRequestAllocationResult{
					{Request: "gpu", Driver: w.driver, Pool: w.nodeName("a"), Device: "gpu-0"},
				},
				Config: []resourceapi.DeviceAllocationConfiguration{{
					Source: resourceapi.AllocationConfigSourceClaim, DeviceConfiguration: opaque(w.driver, `{"sharing":"none"}`),
				}},
			},
			NodeSelector: onlyNode(w.nodeName("a")),
		},
		ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod", UID: pod.UID}},
	}
	got.Status.Allocation.AllocationTimestamp = nil
	if diff := cmp.Diff(want, got.Status); diff != "" {
		t.Errorf("claim's status (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{resourceapi.Finalizer}, got.Finalizers); diff != "" {
		t.Errorf("claim's finalizers (-want +got):\n%s", diff)
	}
}

func opaque(driver, parameters string) resourceapi.DeviceConfiguration {
	c := &resourceapi.OpaqueDeviceConfiguration{Driver: driver}
	c.Parameters.Raw = []byte(parameters)
	return resourceapi.DeviceConfiguration{Opaque: c}
}

// roundTripper lets a function stand between a client and the API server.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// writesClaim tells whether the request changes a claim of the namespace.
func writesClaim(r *http.Request, namespace string) bool {
	return (r.Method == http.MethodPut || r.Method == http.MethodPatch) &&
		strings.Contains(r.URL.Path, "/namespaces/"+namespace+"/resourceclaims/")
}

// PreBind: somebody else writes the claim just before each of our writes. The pod is bound by the same attempt.
func TestConflictingWritesAreRetried(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var interferences, conflicts atomic.Int32
	interfere := func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if !writesClaim(r, w.name) {
				return next.RoundTrip(r)
			}
			if n := interferences.Add(1); n <= 4 && n%2 == 1 {
				patch := fmt.Appendf(nil, `{"metadata":{"annotations":{"test.example/interference":"%d"}}}`, n)
				if _, err := w.client.ResourceV1().ResourceClaims(w.name).Patch(r.Context(), "wanted",
					types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
					return nil, err
				}
			}
			response, err := next.RoundTrip(r)
			if err == nil && response.StatusCode == http.StatusConflict {
				conflicts.Add(1)
			}
			return response, err
		})
	}
	w.addNode("a", gpus(h100, 1)...)
	w.addClaim("wanted", spec(w.exactly("gpu", 1)))
	s := startScheduler(t, w.name, schedulerSetup{wrap: interfere}) // after the slice, so that the first attempt sees it
	w.addPod("pod", withClaim("wanted"))
	w.awaitBound("pod")

	if conflicts.Load() == 0 {
		t.Error("the API server reported no conflict: the test proves nothing")
	}
	if c := s.probe.of("pod"); c.attempts != 1 {
		t.Errorf("the pod took %d attempts, want 1", c.attempts)
	}
	claim := w.claim("wanted")
	if len(devices(claim)) != 1 || len(claim.Status.ReservedFor) != 1 || len(claim.Finalizers) != 1 || claim.Annotations["test.example/interference"] == "" {
		t.Errorf("want one device, one reservation, one finalizer, and the other writer's annotation: %s", describe(claim))
	}
}

// PreBind: the API server fails for a while. The pod is tried again, and no device is lost meanwhile.
func TestFailedWriteIsTriedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var failures atomic.Int32
	fail := func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if writesClaim(r, w.name) && strings.HasSuffix(r.URL.Path, "/status") && failures.Add(1) <= 2 {
				return nil, fmt.Errorf("the test cuts the connection")
			}
			return next.RoundTrip(r)
		})
	}
	startScheduler(t, w.name, schedulerSetup{wrap: fail})
	w.addNode("a", gpus(h100, 1)...)
	w.addClaim("wanted", spec(w.exactly("gpu", 1)))
	w.addPod("pod", withClaim("wanted"))
	w.awaitBound("pod")
	if got := devices(w.claim("wanted")); len(got) != 1 {
		t.Errorf("the claim has the devices %q, want one", got)
	}
}

// The claim goes while its pod is between Reserve and PreBind, and comes back under the same name.
func TestClaimDeletedWhileItsPodIsScheduled(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var deleted atomic.Bool
	p := &probe{permit: func(ctx context.Context, pod *v1.Pod, _ string) (*fwk.Status, time.Duration) {
		if pod.Name == "pod" && deleted.CompareAndSwap(false, true) {
			if err := w.client.ResourceV1().ResourceClaims(w.name).Delete(ctx, "wanted", metav1.DeleteOptions{}); err != nil {
				return fwk.AsStatus(err), 0
			}
		}
		return nil, 0
	}}
	startScheduler(t, w.name, schedulerSetup{probe: p})
	w.addNode("a", gpus(h100, 1)...)
	old := w.addClaim("wanted", spec(w.exactly("gpu", 1)))
	pod := w.addPod("pod", withClaim("wanted"))
	w.awaitEvent(pod, "wanted")

	// The device is not lost with the claim.
	w.addClaim("other", spec(w.exactly("gpu", 1)))
	w.addPod("second", withClaim("other"))
	w.awaitBound("second")

	// Nothing of the old claim lives on in the new one.
	w.addClaim("wanted", spec(w.exactly("gpu", 1)))
	w.awaitUnschedulable("pod", "wanted")
	w.deletePod("second")
	w.awaitBound("pod")
	if claim := w.claim("wanted"); claim.UID == old.UID || len(devices(claim)) != 1 {
		t.Errorf("want a new claim with one device: %s", describe(claim))
	}
}

// SignPod: pods without claims can be signed, so that batching is not off for the whole profile, and a
// pod's devices never look like those of another pod.
func TestSignatures(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := startScheduler(t, w.name, schedulerSetup{edit: func(c *schedulerconfig.KubeSchedulerConfiguration) {
		// The default constraints of this plugin keep every pod from being signed, with or without ours.
		for _, p := range c.Profiles[0].PluginConfig {
			if args, ok := p.Args.(*schedulerconfig.PodTopologySpreadArgs); ok {
				args.DefaultingType = schedulerconfig.ListDefaulting
			}
		}
	}})
	sign := func(pod *v1.Pod) string {
		return string(s.profiles[s.name].SignPod(t.Context(), pod))
	}

	plain := sign(w.newPod("plain"))
	if plain == "" {
		t.Error("a pod without claims is not signed")
	}
	if again := sign(w.newPod("same")); again != plain {
		t.Errorf("equal pods have the signatures %q and %q", plain, again)
	}
	one, two := sign(w.newPod("one", withClaim("one"))), sign(w.newPod("two", withClaim("two")))
	if one == plain || two == plain || (one != "" && one == two) {
		t.Errorf("pods with different devices have equal signatures: none %q, one claim %q, another %q", plain, one, two)
	}
}
