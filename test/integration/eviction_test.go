// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/utils/ptr"
)

// broken is a taint that ends what runs on a device.
var broken = resourceapi.DeviceTaint{Key: "test.example/broken", Value: "xid-79", Effect: resourceapi.DeviceTaintEffectNoExecute}

// addReplicaSet makes a ReplicaSet that keeps one such pod.
func (w *world) addReplicaSet(name string, options ...podOption) {
	w.t.Helper()
	pod := w.newPod("", append(options, withLabel("set", name))...)
	_, err := w.client.AppsV1().ReplicaSets(w.name).Create(w.ctx, &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.ReplicaSetSpec{
			Replicas: ptr.To[int32](1),
			Selector: &metav1.LabelSelector{MatchLabels: pod.Labels},
			Template: v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: pod.Labels}, Spec: pod.Spec},
		},
	}, metav1.CreateOptions{})
	w.must(err, "creating replica set %s", name)
	w.t.Cleanup(func() { w.cleanUp(w.client.AppsV1().ReplicaSets(w.name).Delete, name) })
}

// awaitReplica waits until the ReplicaSet has a pod that is bound and none of the given ones.
func (w *world) awaitReplica(set string, not ...string) *v1.Pod {
	w.t.Helper()
	return await(w, "a pod of replica set "+set+" to be bound", w.podList(fields.Everything()), func(p *v1.Pod) bool {
		return p.Labels["set"] == set && !slices.Contains(not, p.Name) && p.Spec.NodeName != ""
	})
}

// tolerating is a claim for the GPU with that number that stays with it.
func (w *world) tolerating(number string) resourceapi.ResourceClaimSpec {
	request := w.exactly("gpu", 1, `device.attributes["$DRIVER"].uuid.endsWith("`+number+`")`)
	request.Exactly.Tolerations = []resourceapi.DeviceToleration{{
		Key: broken.Key, Operator: resourceapi.DeviceTolerationOpExists, Effect: broken.Effect,
	}}
	return spec(request)
}

// A device gets a NoExecute taint. kube-controller-manager evicts the pod that uses it and does not tolerate the taint; the pod that
// comes in its place gets another device, elsewhere or on the same node.
func TestPodIsEvictedFromATaintedDevice(t *testing.T) {
	t.Parallel()
	s := startScheduler(t, namePrefix(t.Name())+"scheduler", schedulerSetup{})
	// Each taints the first n GPUs of a node.
	tests := map[string]func(w *world, node string, n int){
		"in its slice": func(w *world, node string, n int) {
			slice, err := w.client.ResourceV1().ResourceSlices().Get(w.ctx, w.nodeName(node), metav1.GetOptions{})
			w.must(err, "getting the slice of node %s", node)
			for i := range n {
				tainted(n, broken)(i, &slice.Spec.Devices[i])
			}
			_, err = w.client.ResourceV1().ResourceSlices().Update(w.ctx, slice, metav1.UpdateOptions{})
			w.must(err, "tainting devices of node %s", node)
		},
		"by a rule": func(w *world, node string, n int) {
			for _, gpu := range gpus(h100, n) {
				w.addTaintRule(node, gpu.Name, broken)
			}
		},
	}
	for name, taint := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := worldOf(t, s)
			w.addNode("a", gpus(h100, 2)...)
			w.addClaim("tolerant", w.tolerating("0"))
			w.addPod("tolerant", withClaim("tolerant"))
			w.awaitBoundTo("tolerant", "a")
			w.addTemplate("one", spec(w.exactly("gpu", 1)))
			w.addReplicaSet("set", withTemplate("one"))
			first := w.awaitReplica("set")

			taint(w, "a", 2)
			w.awaitPodGone(first.Name)
			w.awaitEvent(first, "Marking for deletion") // of the device taint eviction controller
			w.awaitClaimGone(claimName(first, "one"))
			waiting := await(w, "the pod that comes instead", w.podList(fields.Everything()), func(p *v1.Pod) bool {
				return p.Labels["set"] == "set" && p.Name != first.Name
			})
			w.awaitUnschedulable(waiting.Name, "taint")
			w.addNode("b", gpus(h100, 2)...)
			second := w.awaitReplica("set", first.Name)
			w.checkHas(second, "one", "b", "gpu-0")

			taint(w, "b", 1)
			third := w.awaitReplica("set", first.Name, second.Name)
			w.checkHas(third, "one", "b", "gpu-1")
			if pod := w.awaitBound("tolerant"); pod.DeletionTimestamp != nil {
				t.Error("the pod that tolerates the taint is being deleted")
			}
		})
	}
}

// checkHas checks which device of which node a pod got for its claim.
func (w *world) checkHas(pod *v1.Pod, claim, node, device string) {
	w.t.Helper()
	if pod.Spec.NodeName != w.nodeName(node) {
		w.t.Errorf("pod %s is on node %s, want %s", pod.Name, pod.Spec.NodeName, w.nodeName(node))
	}
	if diff := cmp.Diff([]string{device}, devices(w.claim(claimName(pod, claim)))); diff != "" {
		w.t.Errorf("devices of pod %s (-want +got):\n%s", pod.Name, diff)
	}
}
