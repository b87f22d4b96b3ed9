// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/reconcile"
)

func TestTheNodesConditionSaysWhatIsWrong(t *testing.T) {
	well := gpuView{name: "gpu-a", verdict: health.Verdict{Status: health.Healthy}}
	ill := gpuView{name: "gpu-b", verdict: health.Verdict{Status: health.Unhealthy, Faults: []health.Fault{{Reason: health.XID, Value: "79", Message: "XID 79: the GPU has fallen off the bus"}}}}
	noticed := gpuView{name: "gpu-c", verdict: health.Verdict{Status: health.Healthy, Faults: []health.Fault{{Reason: health.RowPending, Message: "a bad row of the memory is replaced with the next reset of the GPU"}}}}
	held := occupiedPlace{gpu: "gpu-d", claim: "old-uid"}
	owed := occupiedPlace{gpu: "gpu-d", quarantined: true}
	occupied := gpuView{name: "gpu-d", verdict: well.verdict, occupied: []string{held.message(), owed.message()}}
	owes := occupiedPlace{gpu: "gpu-e", claim: "old-uid", quarantined: true}
	owesPart := occupiedPlace{gpu: "gpu-e", at: &ledger.Partition{Profile: "1g.10gb", Start: 3, Size: 1}, claim: "old-uid", quarantined: true}
	owesMode := occupiedPlace{gpu: "gpu-e", at: &ledger.Partition{}, claim: "old-uid", quarantined: true}
	unread := occupiedPlace{gpu: "gpu-e", claim: "b-uid", why: reconcile.Unread}
	unknown := occupiedPlace{gpu: "gpu-e", claim: "c-uid", why: reconcile.Unknown}
	kept := gpuView{name: "gpu-e", verdict: well.verdict, occupied: []string{owes.message(), unread.message(), unknown.message()}}
	used := gpuView{name: "gpu-e", verdict: well.verdict, foreign: &foreignUse{processes: []foreignProcess{{41, foreignUser{"python3", ""}}, {42, foreignUser{"train", "pod-uid"}}}}}
	tainted := used
	tainted.foreign = &foreignUse{processes: []foreignProcess{{1, foreignUser{"a", ""}}, {2, foreignUser{"b", ""}}, {3, foreignUser{"c", ""}}, {4, foreignUser{"d", ""}}, {5, foreignUser{"e", ""}}}, taints: true}
	silent := discovery.Failure{PCIBusID: "0000:1b:00.0", Reason: "GPU 1: NVML does not answer, since an earlier time", Err: fmt.Errorf("GPU 1: %w, since an earlier time", discovery.ErrHung)}
	tests := map[string]struct {
		view nodeView
		want string
	}{
		"all is well":              {nodeView{gpus: []gpuView{well, well}}, "True AllGPUsReady: 2 of 2 GPUs can be used"},
		"a text that is not valid": {nodeView{notReady: &problem{reasonRivalPlugin, "the socket x\xff.sock"}}, "False RivalPlugin: Claims cannot be prepared on this node: the socket x?.sock"},
		"the host's configuration": {nodeView{gpus: []gpuView{well}, warning: "pods get GPUs in another way"}, "True AllGPUsReady: 1 of 1 GPUs can be used; pods get GPUs in another way"},
		"a GPU is ill":             {nodeView{gpus: []gpuView{well, ill}}, "False GPUsUnhealthy: 1 of 2 GPUs can be used; gpu-b: XID 79: the GPU has fallen off the bus"},
		"a GPU needs attention":    {nodeView{gpus: []gpuView{noticed}}, "True AllGPUsReady: 1 of 1 GPUs can be used; gpu-c: a bad row of the memory is replaced with the next reset of the GPU"},
		"a GPU is held": {
			nodeView{gpus: []gpuView{well, occupied}},
			"False GPUsOccupied: 1 of 2 GPUs can be used; gpu-d: it is held for claim old-uid, which is not allocated any more; gpu-d: it is in quarantine: something that could not be undone is left on it",
		},
		"a GPU is kept from others, and its claim may be in use": {
			nodeView{gpus: []gpuView{well, kept}},
			"False GPUsOccupied: 1 of 2 GPUs can be used; gpu-e: it is in quarantine: something of claim old-uid that could not be undone is left on it; " +
				"gpu-e: it is held for claim b-uid, whose record cannot be read; gpu-e: it is held for claim c-uid, and the API server has not told yet whether that is allocated",
		},
		"a partition is kept from others": {
			nodeView{gpus: []gpuView{{name: "gpu-e", verdict: well.verdict, occupied: []string{owesPart.message()}}}},
			"False GPUsOccupied: 0 of 1 GPUs can be used; gpu-e: its partition 1g.10gb at slice 3 is in quarantine: something of claim old-uid that could not be undone is left there",
		},
		"MIG mode stays on": {
			nodeView{gpus: []gpuView{{name: "gpu-e", verdict: well.verdict, occupied: []string{owesMode.message()}}}},
			"False GPUsOccupied: 0 of 1 GPUs can be used; gpu-e: it is in quarantine as a whole: MIG mode, which was switched on for claim old-uid, could not be switched off",
		},
		"a process of the host": {
			nodeView{gpus: []gpuView{well, used}},
			"True AllGPUsReady: 2 of 2 GPUs can be used; gpu-e: it is used without a claim by python3 of the host, train of pod pod-uid",
		},
		"many processes, and the GPU is taken out": {
			nodeView{gpus: []gpuView{tainted}},
			"False GPUsUsedWithoutClaim: 0 of 1 GPUs can be used; gpu-e: it is used without a claim by a of the host, b of the host, c of the host, 2 more",
		},
		"a GPU does not answer": {
			nodeView{gpus: []gpuView{well}, silent: []string{silent.String()}},
			"False GPUsDoNotAnswer: 1 of 2 GPUs can be used; gpu-0000-1b-00-0: NVML does not answer",
		},
		"the first that is bad gives the reason": {
			nodeView{gpus: []gpuView{tainted, ill}},
			"False GPUsUsedWithoutClaim: 0 of 2 GPUs can be used; gpu-e: it is used without a claim by a of the host, b of the host, c of the host, 2 more; " +
				"gpu-b: XID 79: the GPU has fallen off the bus",
		},
		"no driver": {nodeView{noGPUs: "the NVIDIA driver is not loaded"}, "False NoGPUsFound: No GPU can be used: the NVIDIA driver is not loaded"},
		"no GPU":    {nodeView{}, "False NoGPUsFound: No GPU can be used: NVML finds none"},
		"no claim can be prepared": {
			nodeView{notReady: &problem{reasonFolderFull, "the folder /var/lib/stowage is full: write x: no space left on device"}, gpus: []gpuView{ill}},
			"False FolderFull: Claims cannot be prepared on this node: the folder /var/lib/stowage is full: write x: no space left on device",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			c := judgeNode(tc.view)
			if got := fmt.Sprintf("%s %s: %s", c.Status, c.Reason, c.Message); got != tc.want || c.Type != ConditionGPUsReady {
				t.Errorf("%s\n got %s\nwant %s", c.Type, got, tc.want)
			}
		})
	}
	long := judgeNode(nodeView{notReady: &problem{"X", strings.Repeat("é", maxNodeMessage)}})
	if n := len(long.Message); n > maxNodeMessage || n < maxNodeMessage-8 || !strings.HasSuffix(long.Message, "é …") {
		t.Errorf("a long message has %d bytes, and ends with %q", n, long.Message[n-10:])
	}
	if long.Status != corev1.ConditionFalse {
		t.Errorf("status %s", long.Status)
	}
}
