// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/ledger"
)

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

func entry() *ledger.Entry {
	return &ledger.Entry{
		Claim: ledger.Claim{UID: "claim-uid", Namespace: "default", Name: "claim"}, State: ledger.PrepareCompleted,
		Devices: []ledger.Device{{Pool: "node-1", Device: "gpu-0", GPU: "gpu-0"}}, Pods: []types.UID{"old-pod-uid"},
	}
}

// unused is a reading that proves that nobody uses the claim.
func unused(at time.Time) *Reading { return &Reading{At: at, Registered: noon.Add(-time.Hour)} }

func claimWith(uid types.UID, devices ...string) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim", UID: uid}}
	if devices != nil {
		claim.Status.Allocation = &resourceapi.AllocationResult{}
		for _, d := range devices {
			claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{Pool: "node-1", Device: d})
		}
	}
	return claim
}

func reserved(claim *resourceapi.ResourceClaim, pod types.UID) *resourceapi.ResourceClaim {
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: strings.TrimSuffix(string(pod), "-uid"), UID: pod}}
	return claim
}

func podWith(name string, phase corev1.PodPhase, change func(*corev1.Pod)) corev1.Pod {
	pod := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name + "-uid")}, Status: corev1.PodStatus{Phase: phase}}
	if change != nil {
		change(&pod)
	}
	return pod
}

func byName(pod *corev1.Pod) {
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpus", ResourceClaimName: new("claim")}}
}

func generated(pod *corev1.Pod) {
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpus", ResourceClaimTemplateName: new("template")}}
	pod.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpus", ResourceClaimName: new("claim")}}
}

func extended(pod *corev1.Pod) {
	pod.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: "claim"}
}

// TestADevicePluginsDeviceIsReleasedOnlyOnProof: the kubelet lists it by resource and ID, and knows no claim of it.
func TestADevicePluginsDeviceIsReleasedOnlyOnProof(t *testing.T) {
	held := entry()
	held.Claim = ledger.Claim{UID: "hold-uid", Name: "nvidia.com.gpu.gpu-0", Plugin: ledger.PluginDevice{Resource: "nvidia.com/gpu", ID: "GPU-1"}}
	for name, test := range map[string]struct {
		device   ledger.PluginDevice
		leftover bool
	}{
		"a pod has it":                                 {device: held.Claim.Plugin},
		"a pod has another device":                     {device: ledger.PluginDevice{Resource: "nvidia.com/gpu", ID: "GPU-2"}, leftover: true},
		"a pod has one of that ID of another resource": {device: ledger.PluginDevice{Resource: "example.com/gpu", ID: "GPU-1"}, leftover: true},
	} {
		t.Run(name, func(t *testing.T) {
			first, second := unused(noon), unused(noon.Add(Interval))
			second.Kubelet = []KubeletPod{{Namespace: "default", Name: "pod", Devices: []ledger.PluginDevice{test.device}}}
			leftover, keep := decideOn(held, first, second)
			if leftover != test.leftover || !leftover && !strings.Contains(keep, "default/pod") {
				t.Errorf("leftover %t, kept because %q; want leftover %t", leftover, keep, test.leftover)
			}
		})
	}
}

func decideOn(entry *ledger.Entry, first, second *Reading) (leftover bool, keep string) {
	return decide(first, second, func(r *Reading) string { return inUse(entry, r) })
}

// TestAClaimIsReleasedOnlyOnProof: each piece of evidence alone keeps the claim, in either reading.
func TestAClaimIsReleasedOnlyOnProof(t *testing.T) {
	tests := map[string]struct {
		change func(*Reading)
		// keep is part of the reason; empty if the claim is a leftover all the same.
		keep string
	}{
		"nobody uses it":           {change: func(*Reading) {}},
		"the API server is away":   {change: func(r *Reading) { r.ClaimErr = errors.New("away") }, keep: "away"},
		"it is allocated":          {change: func(r *Reading) { r.Claim = claimWith("claim-uid", "gpu-7", "gpu-0") }, keep: "is allocated"},
		"it has no allocation":     {change: func(r *Reading) { r.Claim = claimWith("claim-uid") }},
		"it has other devices now": {change: func(r *Reading) { r.Claim = claimWith("claim-uid", "gpu-7") }},
		"it has the device of that name elsewhere": {change: func(r *Reading) {
			r.Claim = claimWith("claim-uid", "gpu-0")
			r.Claim.Status.Allocation.Devices.Results[0].Pool = "node-2"
		}},
		"another claim has its name":            {change: func(r *Reading) { r.Claim = claimWith("other-uid", "gpu-0") }},
		"pods are not known":                    {change: func(r *Reading) { r.PodsErr = errors.New("no list") }, keep: "no list"},
		"a pod has it by name":                  {change: func(r *Reading) { r.Pods = []corev1.Pod{podWith("pod", corev1.PodPending, byName)} }, keep: "default/pod"},
		"a pod has it from a template":          {change: func(r *Reading) { r.Pods = []corev1.Pod{podWith("pod", corev1.PodPending, generated)} }, keep: "default/pod"},
		"a pod has it for an extended resource": {change: func(r *Reading) { r.Pods = []corev1.Pod{podWith("pod", corev1.PodPending, extended)} }, keep: "default/pod"},
		"a pod for which it was prepared":       {change: func(r *Reading) { r.Pods = []corev1.Pod{podWith("old-pod", corev1.PodPending, nil)} }, keep: "default/old-pod"},
		"a pod has another claim": {change: func(r *Reading) {
			r.Pods = []corev1.Pod{podWith("pod", corev1.PodPending, func(p *corev1.Pod) {
				byName(p)
				p.Spec.ResourceClaims[0].ResourceClaimName = new("another")
			})}
		}},
		"a pod has another claim for an extended resource": {change: func(r *Reading) {
			r.Pods = []corev1.Pod{podWith("pod", corev1.PodPending, func(p *corev1.Pod) {
				extended(p)
				p.Status.ExtendedResourceClaimStatus.ResourceClaimName = "another"
			})}
		}},
		"a pod whose claim is not made yet": {change: func(r *Reading) {
			r.Pods = []corev1.Pod{podWith("pod", corev1.PodPending, func(p *corev1.Pod) { generated(p); p.Status.ResourceClaimStatuses = nil })}
		}},
		"a pod that needed no claim of its template": {change: func(r *Reading) {
			r.Pods = []corev1.Pod{podWith("pod", corev1.PodPending, func(p *corev1.Pod) { generated(p); p.Status.ResourceClaimStatuses[0].ResourceClaimName = nil })}
		}},
		"a pod had it and has ended":  {change: func(r *Reading) { r.Pods = []corev1.Pod{podWith("pod", corev1.PodSucceeded, byName)} }},
		"a pod had it and has failed": {change: func(r *Reading) { r.Pods = []corev1.Pod{podWith("pod", corev1.PodFailed, byName)} }},
		"a pod of another namespace": {change: func(r *Reading) {
			r.Pods = []corev1.Pod{podWith("pod", corev1.PodPending, func(p *corev1.Pod) { byName(p); p.Namespace = "other" })}
		}},
		"the kubelet does not answer":                  {change: func(r *Reading) { r.KubeletErr = errors.New("refused") }, keep: "refused"},
		"the kubelet has not registered":               {change: func(r *Reading) { r.Registered = time.Time{} }, keep: "has not registered"},
		"the kubelet has just started":                 {change: func(r *Reading) { r.Registered = noon.Add(-settle + time.Second) }, keep: "short time ago"},
		"the kubelet has started between the readings": {change: func(r *Reading) { r.Registered = noon.Add(30 * time.Second) }, keep: "short time ago"},
		"the kubelet lists it": {change: func(r *Reading) {
			r.Kubelet = []KubeletPod{{Namespace: "default", Name: "pod", Claims: []string{"x", "claim"}}}
		}, keep: "kubelet has it"},
		"the kubelet lists one of that name elsewhere": {change: func(r *Reading) {
			r.Kubelet = []KubeletPod{{Namespace: "other", Name: "pod", Claims: []string{"claim"}}}
		}},
		"the kubelet does not list a running pod yet": {change: func(r *Reading) { r.Pods = []corev1.Pod{podWith("other", corev1.PodRunning, nil)} }, keep: "default/other is missing"},
		"the kubelet lists another pod of its namespace": {change: func(r *Reading) {
			r.Pods = []corev1.Pod{podWith("other", corev1.PodRunning, nil)}
			r.Kubelet = []KubeletPod{{Namespace: "default", Name: "another"}}
		}, keep: "default/other is missing"},
		"the kubelet lists a pod of its name elsewhere": {change: func(r *Reading) {
			r.Pods = []corev1.Pod{podWith("other", corev1.PodRunning, nil)}
			r.Kubelet = []KubeletPod{{Namespace: "elsewhere", Name: "other"}}
		}, keep: "default/other is missing"},
		"the kubelet lists the running pods": {change: func(r *Reading) {
			r.Pods = []corev1.Pod{podWith("other", corev1.PodRunning, nil)}
			r.Kubelet = []KubeletPod{{Namespace: "default", Name: "other"}}
		}},
		"the kubelet lists its CDI device": {change: func(r *Reading) {
			r.Kubelet = []KubeletPod{{Namespace: "default", Name: "pod", CDIClaims: []types.UID{"claim-uid"}}}
		}, keep: "kubelet has it"},
		// A claim of that name was made anew, and has another GPU.
		"a pod has the next claim of its name": {change: func(r *Reading) {
			r.Claim, r.Pods = reserved(claimWith("next-uid", "gpu-7"), "pod-uid"), []corev1.Pod{podWith("pod", corev1.PodRunning, byName)}
			r.Kubelet = []KubeletPod{{Namespace: "default", Name: "pod", Claims: []string{"claim"}, CDIClaims: []types.UID{"next-uid"}}}
		}},
		"the kubelet has the next claim of its name, which nobody has reserved any more": {change: func(r *Reading) {
			r.Claim, r.Kubelet = claimWith("next-uid"), []KubeletPod{{Namespace: "default", Name: "pod", Claims: []string{"claim"}, CDIClaims: []types.UID{"next-uid"}}}
		}},
		"a pod has reserved the next claim of its name, which is not allocated": {change: func(r *Reading) {
			r.Claim, r.Pods = reserved(claimWith("next-uid"), "pod-uid"), []corev1.Pod{podWith("pod", corev1.PodPending, byName)}
		}},
		"a pod has reserved the claim, which is not allocated": {change: func(r *Reading) {
			r.Claim, r.Pods = reserved(claimWith("claim-uid"), "pod-uid"), []corev1.Pod{podWith("pod", corev1.PodPending, byName)}
		}, keep: "default/pod"},
		"a pod may have this claim or the next of its name": {change: func(r *Reading) {
			r.Claim, r.Pods = reserved(claimWith("next-uid", "gpu-7"), "other-uid"), []corev1.Pod{podWith("pod", corev1.PodPending, byName)}
		}, keep: "default/pod"},
		"a pod for which it was prepared has the next of its name": {change: func(r *Reading) {
			r.Claim, r.Pods = reserved(claimWith("next-uid", "gpu-7"), "old-pod-uid"), []corev1.Pod{podWith("old-pod", corev1.PodPending, byName)}
		}, keep: "default/old-pod"},
		// The claim itself was allocated anew, while the kubelet had forgotten it.
		"a pod waits for the other devices that the claim has now": {change: func(r *Reading) {
			r.Claim, r.Pods = reserved(claimWith("claim-uid", "gpu-7"), "pod-uid"), []corev1.Pod{podWith("pod", corev1.PodPending, byName)}
			r.Kubelet = []KubeletPod{{Namespace: "default", Name: "pod", Claims: []string{"claim"}}}
		}},
		"a pod has the other devices that the claim has now, or those of before": {change: func(r *Reading) {
			r.Claim, r.Pods = reserved(claimWith("claim-uid", "gpu-7"), "pod-uid"), []corev1.Pod{podWith("pod", corev1.PodPending, byName)}
			r.Kubelet = []KubeletPod{{Namespace: "default", Name: "pod", Claims: []string{"claim"}, CDIClaims: []types.UID{"claim-uid"}}}
		}, keep: "kubelet has it"},
		"a pod for which it was prepared waits for its other devices": {change: func(r *Reading) {
			r.Claim, r.Pods = reserved(claimWith("claim-uid", "gpu-7"), "old-pod-uid"), []corev1.Pod{podWith("old-pod", corev1.PodPending, byName)}
		}, keep: "default/old-pod"},
		"the kubelet lists a pod for which it was prepared, of a claim with other devices": {change: func(r *Reading) {
			r.Claim, r.Kubelet = reserved(claimWith("claim-uid", "gpu-7"), "old-pod-uid"), []KubeletPod{{Namespace: "default", Name: "old-pod", Claims: []string{"claim"}}}
		}, keep: "kubelet has it"},
		"a pod has the claim, and its other devices are another pod's": {change: func(r *Reading) {
			r.Claim, r.Pods = reserved(claimWith("claim-uid", "gpu-7"), "other-uid"), []corev1.Pod{podWith("pod", corev1.PodPending, byName)}
		}, keep: "default/pod"},
		"the kubelet lists another pod than the one that waits": {change: func(r *Reading) {
			r.Claim, r.Kubelet = reserved(claimWith("claim-uid", "gpu-7"), "pod-uid"), []KubeletPod{
				{Namespace: "default", Name: "another", Claims: []string{"claim"}},
			}
		}, keep: "kubelet has it"},
		"the kubelet lists the name, and not of which of both": {change: func(r *Reading) {
			r.Claim, r.Kubelet = claimWith("next-uid", "gpu-7"), []KubeletPod{{Namespace: "default", Name: "pod", Claims: []string{"claim"}}}
		}, keep: "kubelet has it"},
		// A pod deleted by force is in no list, and its containers have its grace period.
		"a pod deleted by force has processes": {
			change: func(r *Reading) { r.Running = map[types.UID]bool{"": true, "old-pod-uid": true} },
			keep:   "processes of pod old-pod-uid run, which the API server does not have any more",
		},
		"a pod that had ended has processes": {change: func(r *Reading) {
			r.Pods, r.Running = []corev1.Pod{podWith("old-pod", corev1.PodFailed, nil)}, map[types.UID]bool{"old-pod-uid": true}
		}, keep: "processes of pod default/old-pod run, although it has ended"},
		"a pod that had ended has processes, after another in the list": {change: func(r *Reading) {
			r.Pods, r.Running = []corev1.Pod{podWith("pod", corev1.PodPending, nil), podWith("old-pod", corev1.PodFailed, nil)}, map[types.UID]bool{"old-pod-uid": true}
		}, keep: "processes of pod default/old-pod run, although it has ended"},
		"a pod without it that had ended has processes": {change: func(r *Reading) {
			r.Pods, r.Running = []corev1.Pod{podWith("pod", corev1.PodFailed, nil)}, map[types.UID]bool{"pod-uid": true}
		}},
		"static pods have processes": {change: func(r *Reading) {
			r.Pods = []corev1.Pod{podWith("static", corev1.PodPending, func(p *corev1.Pod) {
				p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "uid-in-its-file"}
			})}
			r.Running = map[types.UID]bool{"0123456789abcdef0123456789abcdef": true, "uid-in-its-file": true}
		}},
		"pods' processes are not known": {change: func(r *Reading) { r.RunningErr = errors.New("no table") }, keep: "no table"},
		"NVML does not answer":          {change: func(r *Reading) { r.ProcessesErr = errors.New("hung") }, keep: "hung"},
		"a process is on its GPU":       {change: func(r *Reading) { r.Processes = 1 }, keep: "1 processes"},
		"the readings are too close":    {change: func(r *Reading) { r.At = noon.Add(30 * time.Second) }, keep: "only once"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			for which := range 2 {
				readings := []*Reading{unused(noon), unused(noon.Add(Interval))}
				if tc.keep == "short time ago" || tc.keep == "only once" {
					which = 1 // these are of the two together
				}
				tc.change(readings[which])
				leftover, keep := decideOn(entry(), readings[0], readings[1])
				if leftover != (tc.keep == "") || !strings.Contains(keep, tc.keep) {
					t.Errorf("in reading %d: leftover %v, because %q; want a reason with %q", which, leftover, keep, tc.keep)
				}
			}
		})
	}
	if leftover, keep := decideOn(entry(), nil, unused(noon)); leftover || keep == "" {
		t.Errorf("after one reading: leftover %v, %q", leftover, keep)
	}
}

// TestAClaimThatKeptSomeOfItsDevicesIsAllocatedAnew: the pod that waits for the others is not what the devices of before are kept for, and one for which
// they were prepared is.
func TestAClaimThatKeptSomeOfItsDevicesIsAllocatedAnew(t *testing.T) {
	for name, tc := range map[string]struct {
		devices []string
		pod     string
		keep    string
	}{
		"both":                              {[]string{"gpu-1", "gpu-0"}, "pod", "is allocated"},
		"both, and another":                 {[]string{"gpu-1", "gpu-7", "gpu-0"}, "pod", "is allocated"},
		"one of two":                        {[]string{"gpu-1", "gpu-7"}, "pod", ""},
		"one of two, for the pod of before": {[]string{"gpu-1", "gpu-7"}, "old-pod", "default/old-pod"},
	} {
		t.Run(name, func(t *testing.T) {
			two := entry()
			two.Devices = append(two.Devices, ledger.Device{Pool: "node-1", Device: "gpu-1", GPU: "gpu-1"})
			at := func(at time.Time) *Reading {
				r := unused(at)
				r.Claim, r.Pods = reserved(claimWith("claim-uid", tc.devices...), types.UID(tc.pod+"-uid")), []corev1.Pod{podWith(tc.pod, corev1.PodPending, byName)}
				r.Kubelet = []KubeletPod{{Namespace: "default", Name: tc.pod, Claims: []string{"claim"}}}
				return r
			}
			if leftover, keep := decideOn(two, at(noon), at(noon.Add(Interval))); leftover != (tc.keep == "") || !strings.Contains(keep, tc.keep) {
				t.Errorf("leftover %v, because %q; want a reason with %q", leftover, keep, tc.keep)
			}
		})
	}
}
