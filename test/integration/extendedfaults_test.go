// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/tools/cache"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/utils/ptr"
)

func (w *world) quotaList() cache.ListerWatcher {
	return cache.NewListWatchFromClient(w.client.CoreV1().RESTClient(), "resourcequotas", w.name, fields.Everything())
}

// Fifty pods at once, each with an init container and an app container, for 16 GPUs on 2 nodes: no device is given
// twice, none is lost, and no claim is left.
func TestBurstOfExtendedResources(t *testing.T) {
	t.Parallel()
	const pods, nodes, perNode = 50, 2, 8
	w := newWorld(t)
	startScheduler(t, w.name, schedulerSetup{})
	extended := w.standsFor(w.class, "gpu")
	for i := range nodes {
		w.addNode(fmt.Sprint(i), gpus(h100, perNode)...)
	}
	audit := w.auditDevices()
	var creators sync.WaitGroup
	for i := range pods {
		creators.Go(func() {
			pod := w.newPod(fmt.Sprintf("pod-%03d", i), asks(extended, "init=2", "main=2"))
			if _, err := w.client.CoreV1().Pods(w.name).Create(w.ctx, pod, metav1.CreateOptions{}); err != nil {
				t.Errorf("creating pod %d: %v", i, err)
			}
		})
	}
	creators.Wait()

	w.awaitPods("bound", nodes*perNode/2, 3*patience, func(p *v1.Pod) bool { return p.Spec.NodeName != "" })
	ended := sets.New[string]()
	w.awaitPods("ended", pods, 3*patience, func(p *v1.Pod) bool {
		if p.Spec.NodeName != "" && !ended.Has(p.Name) {
			ended.Insert(p.Name)
			if p.Status.ExtendedResourceClaimStatus == nil {
				t.Errorf("pod %s was bound before its status named a claim", p.Name)
			}
			w.endPod(p)
		}
		return p.Status.Phase == v1.PodSucceeded
	})
	if most := audit.stop(); most != nodes*perNode {
		t.Errorf("at most %d devices were held at once, want all %d", most, nodes*perNode)
	}
	w.awaitNoClaims()
}

// awaitNoClaims waits until the world has no claims but those of the given pods.
func (w *world) awaitNoClaims(but ...*v1.Pod) {
	w.t.Helper()
	list, err := w.client.ResourceV1().ResourceClaims(w.name).List(w.ctx, metav1.ListOptions{})
	w.must(err, "listing claims")
	for i := range list.Items {
		claim := &list.Items[i]
		if !slices.ContainsFunc(but, func(p *v1.Pod) bool { return metav1.IsControlledBy(claim, p) }) {
			w.awaitClaimGone(claim.Name)
		}
	}
}

// The API server fails at each of our writes, with and without effect. The pod is bound in the end, with one claim, and
// nothing else holds devices.
func TestExtendedResourceAndFailingWrites(t *testing.T) {
	t.Parallel()
	writes := map[string]func(r *http.Request, namespace string) bool{
		"creation of the claim": func(r *http.Request, namespace string) bool {
			return r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/namespaces/"+namespace+"/resourceclaims")
		},
		"finalizer": func(r *http.Request, namespace string) bool {
			return writesClaim(r, namespace) && !strings.HasSuffix(r.URL.Path, "/status")
		},
		"allocation": func(r *http.Request, namespace string) bool {
			return writesClaim(r, namespace) && strings.HasSuffix(r.URL.Path, "/status")
		},
		"status of the pod": func(r *http.Request, namespace string) bool {
			return r.Method == http.MethodPatch && strings.HasSuffix(r.URL.Path, "/namespaces/"+namespace+"/pods/pod/status")
		},
	}
	for name, matches := range writes {
		for _, effective := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, effective %t", name, effective), func(t *testing.T) {
				t.Parallel()
				w := newWorld(t)
				var failures atomic.Int32
				fail := func(next http.RoundTripper) http.RoundTripper {
					return roundTripper(func(r *http.Request) (*http.Response, error) {
						if !matches(r, w.name) || failures.Add(1) > 2 {
							return next.RoundTrip(r)
						}
						if effective {
							if response, err := next.RoundTrip(r); err == nil {
								response.Body.Close()
							}
						}
						return nil, errors.New("the test cuts the connection")
					})
				}
				startScheduler(t, w.name, schedulerSetup{wrap: fail})
				extended := w.standsFor(w.class, "gpu")
				w.addNode("a", gpus(h100, 3)...)
				audit := w.auditDevices()
				w.addPod("pod", asks(extended, "main=2"))
				pod := w.awaitBoundTo("pod", "a")
				if failures.Load() < 2 {
					t.Errorf("the write was tried %d times: the test proves nothing", failures.Load())
				}
				if claim := w.extendedClaim(pod); len(devices(claim)) != 2 {
					t.Errorf("want 2 devices: %s", describe(claim))
				}
				w.addPod("other", asks(extended, "main=1")) // the third device is free
				w.awaitBound("other")
				audit.stop()
			})
		}
	}
}

// A later step fails when all is written: the claim goes, its devices are free, and the next attempt has a claim of its
// own. The status can be replaced, but not be taken back.
func TestExtendedClaimOfAPodThatFailsToBindIsRemoved(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var before, later atomic.Pointer[string] // the claim's name when the later step failed, and when it did not
	p := &probe{preBind: func(ctx context.Context, pod *v1.Pod, _ string) *fwk.Status {
		current, err := w.client.CoreV1().Pods(w.name).Get(ctx, pod.Name, metav1.GetOptions{})
		if err != nil {
			return fwk.AsStatus(err)
		}
		if current.Status.ExtendedResourceClaimStatus == nil {
			return fwk.AsStatus(errors.New("the status names no claim when our PreBind is done"))
		}
		if before.CompareAndSwap(nil, &current.Status.ExtendedResourceClaimStatus.ResourceClaimName) {
			return fwk.AsStatus(errors.New("the test says no"))
		}
		later.Store(&current.Status.ExtendedResourceClaimStatus.ResourceClaimName)
		return nil
	}}
	startScheduler(t, w.name, schedulerSetup{probe: p})
	extended := w.standsFor(w.class, "gpu")
	w.addNode("a", gpus(h100, 2)...)
	w.addPod("pod", asks(extended, "main=2"))
	pod := w.awaitBoundTo("pod", "a")
	claim := w.extendedClaim(pod)
	if *before.Load() == claim.Name || *later.Load() != claim.Name {
		t.Errorf("the claims were %s and then %s, now it is %s", *before.Load(), *later.Load(), claim.Name)
	}
	w.awaitClaimGone(*before.Load())
}

// A scheduler ended after it had written all but the binding. The next one uses what is there, also if the pod could
// get devices elsewhere.
func TestExtendedClaimSurvivesTheScheduler(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		nodeIsGone bool
		unreserved bool
	}{
		"its node is there":                 {},
		"its node is there, and unreserved": {unreserved: true},
		"its node can no longer be used":    {nodeIsGone: true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			extended := w.standsFor(w.class, "gpu")
			w.addNode("a", gpus(h100, 2)...)
			w.addNode("b", gpus(h100, 2)...)
			pod := w.addPod("pod", asks(extended, "main=2"))
			left := w.leaveExtendedClaim(pod, extended, "b", !test.unreserved)
			if test.nodeIsGone {
				w.must(w.client.CoreV1().Nodes().Delete(w.ctx, w.nodeName("b"), metav1.DeleteOptions{}), "deleting the node")
			}
			startScheduler(t, w.name, schedulerSetup{})
			if test.nodeIsGone {
				pod = w.awaitBoundTo("pod", "a")
				w.awaitClaimGone(left.Name)
			} else {
				pod = w.awaitBoundTo("pod", "b")
			}
			if claim := w.extendedClaim(pod); (claim.UID == left.UID) == test.nodeIsGone {
				t.Errorf("the pod has claim %s, the earlier scheduler left %s", claim.Name, left.Name)
			}
		})
	}
}

// leaveExtendedClaim does for a pod what a scheduler has done that ended just before the binding.
func (w *world) leaveExtendedClaim(pod *v1.Pod, extended, nodeSuffix string, reserved bool) *resourceapi.ResourceClaim {
	w.t.Helper()
	const request = "container-0-request-0"
	claim, err := w.client.ResourceV1().ResourceClaims(w.name).Create(w.ctx, &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{
			Name:        "left",
			Annotations: map[string]string{resourceapi.ExtendedResourceClaimAnnotation: "true"},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID, Controller: ptr.To(true),
			}},
		},
		Spec: spec(w.exactly(request, 2)),
	}, metav1.CreateOptions{})
	w.must(err, "creating the claim")
	claim = w.allocate(claim, nodeSuffix, "gpu-0", "gpu-1")
	if !reserved {
		return claim
	}
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: pod.Name, UID: pod.UID}}
	claim, err = w.client.ResourceV1().ResourceClaims(w.name).UpdateStatus(w.ctx, claim, metav1.UpdateOptions{})
	w.must(err, "reserving the claim")
	patch := fmt.Appendf(nil, `{"status":{"extendedResourceClaimStatus":{"resourceClaimName":%q,"requestMappings":[{"containerName":"main","resourceName":%q,"requestName":%q}]}}}`,
		claim.Name, extended, request)
	_, err = w.client.CoreV1().Pods(w.name).Patch(w.ctx, pod.Name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	w.must(err, "writing the pod's status")
	return claim
}

// The pod is deleted while its claim is made: neither claim nor device is left.
func TestPodWithExtendedResourceDeletedWhileItIsBound(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := &probe{preBind: func(ctx context.Context, pod *v1.Pod, _ string) *fwk.Status {
		if pod.Name != "pod" {
			return nil
		}
		if err := w.client.CoreV1().Pods(w.name).Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil {
			return fwk.AsStatus(err)
		}
		return nil
	}}
	startScheduler(t, w.name, schedulerSetup{probe: p})
	extended := w.standsFor(w.class, "gpu")
	w.addNode("a", gpus(h100, 2)...)
	w.addPod("pod", asks(extended, "main=2"))
	w.awaitPodGone("pod")
	w.addPod("next", asks(extended, "main=2"))
	next := w.awaitBoundTo("next", "a")
	w.extendedClaim(next)
	w.awaitNoClaims(next)
}
