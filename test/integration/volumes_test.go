// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
)

// What kube-scheduler's plugins for volumes say about nodes.
const (
	noStorage     = "did not have enough free storage"
	otherSegment  = "didn't match PersistentVolume's node affinity"
	volumeInUse   = "ReadWriteOncePod access mode already in-use"
	tooFewDevices = "node(s) with too few devices that match the claim"
)

// A pod with a device and a volume that is still to be provisioned gets neither until one node has both, and waits
// with both reasons.
func TestPodNeedsDeviceAndStorageOnOneNode(t *testing.T) {
	t.Parallel()
	scheduler := startScheduler(t, namePrefix(t.Name())+"scheduler", schedulerSetup{})
	tests := map[string]struct {
		// then makes one node have both.
		then func(s *storage)
		node string
	}{
		"storage where the device is": {
			then: func(s *storage) { s.fill("gpu") },
			node: "gpu",
		},
		"a device where the storage is": {
			then: func(s *storage) { s.addSlice(s.slice("storage", gpus(h100, 1)...)) },
			node: "storage",
		},
		"a device is freed where the storage is": {
			then: func(s *storage) { s.deletePod("holder") },
			node: "full",
		},
		"another node": {
			then: func(s *storage) {
				s.addNode("both", gpus(h100, 1)...)
				s.reaches("both", "both")
				s.fill("both")
			},
			node: "both",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := worldOf(t, scheduler)
			s := w.addStorage()
			s.provision(func(string) bool { return false })
			w.addNode("gpu", gpus(h100, 1)...)
			w.addNode("storage")
			w.addNode("full", gpus(h100, 1)...)
			for _, node := range []string{"gpu", "storage", "full"} {
				s.reaches(node, node)
			}
			s.must(s.setCapacity("gpu", "1Gi"), "publishing the capacity of segment gpu")
			s.fill("storage", "full")
			w.addTemplate("one", spec(w.exactly("gpu", 1)))
			w.addPod("holder", withTemplate("one"), w.onNode("full"))
			w.awaitBound("holder")

			w.addClaim("wanted", spec(w.exactly("gpu", 1)))
			volumeClaim := s.addVolumeClaim("data")
			w.addPod("pod", withClaim("wanted"), withVolume("data"))
			w.awaitUnschedulable("pod", "0/", "1 node(s) "+noStorage, "1 "+tooFewDevices, "1 node(s) whose matching devices are held by other claims")
			if claim := w.claim("wanted"); len(devices(claim)) > 0 {
				t.Errorf("the pod waits, and its claim has a device: %s", describe(claim))
			}
			s.checkUntouched(volumeClaim, "while the pod waits")

			tc.then(s)
			w.awaitBoundTo("pod", tc.node)
			if got, want := s.awaitVolume("data"), s.segment(tc.node); got != want {
				t.Errorf("the volume is in segment %s, want %s", got, want)
			}
			if got, want := w.claim("wanted").Status.Allocation.Devices.Results[0].Pool, w.nodeName(tc.node); got != want {
				t.Errorf("the device is of %s, want of %s", got, want)
			}
		})
	}
}

// refusals counts where volumes were not provisioned.
type refusals struct {
	mutex sync.Mutex
	nodes []string
}

func (r *refusals) add(node string) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.nodes = append(r.nodes, node)
}

func (r *refusals) distinct() sets.Set[string] {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return sets.New(r.nodes...)
}

// exhaust has the provisioner find a segment exhausted after a pod was sent there, as long as it is told to.
func (s *storage) exhaust(tell func(node string) bool) *refusals {
	s.t.Helper()
	seen := &refusals{}
	s.provision(func(node string) bool {
		if !tell(node) {
			return false
		}
		seen.add(node)
		if err := s.setCapacity(strings.TrimPrefix(node, s.nodeName("")), "0"); err != nil && s.ctx.Err() == nil {
			s.t.Errorf("publishing that the segment of node %s is exhausted: %v", node, err)
		}
		return true
	})
	return seen
}

// A volume cannot be provisioned on the node that was chosen: the device there is given back, and both are tried on the
// other node.
func TestProvisioningFailureMovesDeviceAndVolume(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.addStorage()
	startScheduler(t, w.name, schedulerSetup{})
	var once sync.Mutex
	first := ""
	refused := s.exhaust(func(node string) bool {
		once.Lock()
		defer once.Unlock()
		if first == "" {
			first = node
		}
		return node == first
	})
	for _, node := range []string{"a", "b"} {
		w.addNode(node, gpus(h100, 1)...)
		s.reaches(node, node)
	}
	s.fill("a", "b")
	w.addClaim("wanted", spec(w.exactly("gpu", 1)))
	s.addVolumeClaim("data")
	pod := w.addPod("pod", withClaim("wanted"), withVolume("data"))

	bound := w.awaitBound("pod")
	if !refused.distinct().Has(first) || bound.Spec.NodeName == first {
		t.Fatalf("the pod is on node %s, the first choice was %s", bound.Spec.NodeName, first)
	}
	w.awaitEvent(pod, "provisioning failed")
	suffix := strings.TrimPrefix(bound.Spec.NodeName, w.nodeName(""))
	if got, want := s.awaitVolume("data"), s.segment(suffix); got != want {
		t.Errorf("the volume is in segment %s, want %s", got, want)
	}
	claim := w.claim("wanted")
	if got := claim.Status.Allocation.Devices.Results[0].Pool; got != bound.Spec.NodeName {
		t.Errorf("the device is of %s, the pod on %s", got, bound.Spec.NodeName)
	}
	s.checkGivenBackAtOnce(pod)
	// The device of the first choice is free.
	w.addClaim("other", spec(w.exactly("gpu", 1)))
	w.addPod("other", withClaim("other"))
	if got := w.awaitBound("other").Spec.NodeName; got != first {
		t.Errorf("another pod is on node %s, want %s", got, first)
	}
}

// checkGivenBackAtOnce fails if the pod's allocation was still in its way when it was tried again.
func (s *storage) checkGivenBackAtOnce(pod *v1.Pod) {
	s.t.Helper()
	events, err := s.client.CoreV1().Events(s.name).List(s.ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + pod.Name})
	s.must(err, "listing events")
	for i := range events.Items {
		if strings.Contains(events.Items[i].Message, "gave up the allocation") {
			s.t.Errorf("the device was not given back when the volume failed, but later: %s", events.Items[i].Message)
		}
	}
}

// A volume cannot be provisioned anywhere: the pod waits for storage without a device, which another pod gets.
func TestProvisioningFailureReleasesTheDevice(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.addStorage()
	startScheduler(t, w.name, schedulerSetup{})
	var mutex sync.Mutex
	exhausted := true
	s.exhaust(func(string) bool {
		mutex.Lock()
		defer mutex.Unlock()
		return exhausted
	})
	w.addNode("a", gpus(h100, 1)...)
	s.reaches("a", "a")
	s.fill("a")
	w.addClaim("wanted", spec(w.exactly("gpu", 1)))
	s.addVolumeClaim("data")
	pod := w.addPod("pod", withClaim("wanted"), withVolume("data"))
	w.awaitEvent(pod, "provisioning failed")
	w.awaitUnschedulable("pod", noStorage)
	w.awaitClaim("wanted", "given back", func(c *resourceapi.ResourceClaim) bool {
		return c.Status.Allocation == nil && len(c.Status.ReservedFor) == 0
	})
	s.checkGivenBackAtOnce(pod)
	w.addClaim("other", spec(w.exactly("gpu", 1)))
	other := w.addPod("other", withClaim("other"))
	w.awaitBoundTo("other", "a")

	mutex.Lock()
	exhausted = false
	mutex.Unlock()
	s.fill("a")
	w.awaitUnschedulable("pod", "held", "if claim "+w.name+"/other were released")
	w.endPod(other)
	w.awaitBoundTo("pod", "a")
	s.awaitVolume("data")
}

// Another scheduler was first with the device: no volume is provisioned on that node, neither while that is not known nor
// when it is.
func TestNoVolumeForAPodThatLosesTheFence(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.addStorage()
	s.provision(func(string) bool { return false })
	s.must(s.publishCapacity("everywhere", map[string]string{worldLabel: w.name}, segmentSize), "publishing capacity for all nodes")
	volumeClaim := s.addVolumeClaim("data")
	watch := bothChoose(w, schedulerSetup{}, withVolume("data"))
	s.checkUntouched(volumeClaim, "while it is not known who was first")
	watch.release()
	w.awaitUnschedulable("second", "claim "+w.name+"/first", "was allocated earlier")
	w.awaitClaim("second", "given back", func(c *resourceapi.ResourceClaim) bool { return c.Status.Allocation == nil })
	s.checkUntouched(volumeClaim, "for a pod without a device")

	s.reaches("a", "a")
	w.endPod(w.awaitBound("first"))
	w.awaitBoundTo("second", "a")
	s.awaitVolume("data")
}

// A volume that is there and nobody's is bound with the device, on the node that reaches it: the scheduler writes the volume.
func TestAVolumeThatIsNobodysIsBoundWithTheDevice(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	startScheduler(t, w.name, schedulerSetup{})
	s := w.addStorage()
	for node, segment := range map[string]string{"a": "west", "b": "east"} {
		w.addNode(node, gpus(h100, 1)...)
		s.reaches(node, segment)
	}
	claim := s.addVolumeClaim("data") // there is no room to provision one
	pv := s.volumeFor(claim, w.name, s.segment("east"))
	pv.Annotations, pv.Spec.ClaimRef = nil, nil
	_, err := w.client.CoreV1().PersistentVolumes().Create(w.ctx, pv, metav1.CreateOptions{})
	w.must(err, "creating the volume")
	t.Cleanup(func() { w.cleanUp(w.client.CoreV1().PersistentVolumes().Delete, pv.Name) })
	t.Cleanup(func() { w.cleanUp(w.client.CoreV1().PersistentVolumeClaims(w.name).Delete, claim.Name) })
	volumes := cache.NewListWatchFromClient(w.client.CoreV1().RESTClient(), "persistentvolumes", metav1.NamespaceAll, named(pv.Name))
	await(w, "the volume to be available", volumes, func(pv *v1.PersistentVolume) bool { return pv.Status.Phase == v1.VolumeAvailable })
	w.addTemplate("one", spec(w.exactly("gpu", 1)))
	w.addPod("pod", withTemplate("one"), withVolume("data"))
	w.awaitBoundTo("pod", "b")
	if got := s.awaitVolume("data"); got != s.segment("east") {
		t.Errorf("the volume is in segment %s", got)
	}
}

// A volume that exists decides where the device comes from.
func TestBoundVolumePinsTheDevice(t *testing.T) {
	t.Parallel()
	scheduler := startScheduler(t, namePrefix(t.Name())+"scheduler", schedulerSetup{})
	// Nodes a and b reach segment west, c and d reach segment east. The volume is in east.
	tests := map[string]struct {
		before func(s *storage)
		wants  []podOption
		// on is the node that the pod gets, or none, with the reasons.
		on      string
		reasons []string
	}{
		"the only free device of the segment": {
			before: func(s *storage) { s.addPod("holder", withTemplate("one"), s.onNode("c")) },
			on:     "d",
		},
		"no free device in the segment": {
			before: func(s *storage) {
				s.addPod("holder-c", withTemplate("one"), s.onNode("c"))
				s.addPod("holder-d", withTemplate("one"), s.onNode("d"))
			},
			reasons: []string{"2 node(s) " + otherSegment, "2 node(s) whose matching devices are held by other claims"},
		},
		"a second volume is provisioned beside it": {
			before: func(s *storage) {
				s.addPod("holder", withTemplate("one"), s.onNode("d"))
				s.fill("west", "east")
				s.addVolumeClaim("scratch")
			},
			wants: []podOption{withVolume("scratch")},
			on:    "c",
		},
		"a second volume has no room beside it": {
			before: func(s *storage) {
				s.fill("west")
				s.addVolumeClaim("scratch")
			},
			wants:   []podOption{withVolume("scratch")},
			reasons: []string{"2 node(s) " + otherSegment, "2 node(s) " + noStorage},
		},
		"a claim that is allocated elsewhere and unused moves": {
			before: func(s *storage) {
				s.addPod("holder", withTemplate("one"), s.onNode("c"))
				s.allocate(s.addClaim("wanted", spec(s.exactly("gpu", 1))), "a", "gpu-0")
			},
			on: "d",
		},
		"a claim that is used elsewhere stays": {
			before: func(s *storage) {
				s.addClaim("wanted", spec(s.exactly("gpu", 1)))
				s.addPod("user", withClaim("wanted"), s.onNode("a"))
				s.awaitBoundTo("user", "a")
			},
			reasons: []string{otherSegment},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := worldOf(t, scheduler)
			s := w.addStorage()
			s.provision(func(string) bool { return false })
			for node, segment := range map[string]string{"a": "west", "b": "west", "c": "east", "d": "east"} {
				w.addNode(node, gpus(h100, 1)...)
				s.reaches(node, segment)
			}
			s.addBoundVolume("data", "east", v1.ReadWriteOnce)
			w.addTemplate("one", spec(w.exactly("gpu", 1)))
			tc.before(s)
			for _, pod := range w.podNames() {
				w.awaitBound(pod)
			}
			if _, err := w.client.ResourceV1().ResourceClaims(w.name).Get(w.ctx, "wanted", metav1.GetOptions{}); err != nil {
				w.addClaim("wanted", spec(w.exactly("gpu", 1)))
			}

			w.addPod("pod", append(tc.wants, withClaim("wanted"), withVolume("data"))...)
			if tc.on == "" {
				w.awaitUnschedulable("pod", tc.reasons...)
				return
			}
			w.awaitBoundTo("pod", tc.on)
			if got, want := w.claim("wanted").Status.Allocation.Devices.Results[0].Pool, w.nodeName(tc.on); got != want {
				t.Errorf("the device is of %s, want of %s", got, want)
			}
			for _, volume := range w.podVolumes("pod") {
				if got, want := s.awaitVolume(volume), s.segment("east"); got != want {
					t.Errorf("volume %s is in segment %s, want %s", volume, got, want)
				}
			}
		})
	}
}

// podVolumes are the pod's volume claims.
func (w *world) podVolumes(pod string) []string {
	w.t.Helper()
	p, err := w.client.CoreV1().Pods(w.name).Get(w.ctx, pod, metav1.GetOptions{})
	w.must(err, "getting pod %s", pod)
	var claims []string
	for _, volume := range p.Spec.Volumes {
		if volume.PersistentVolumeClaim != nil {
			claims = append(claims, volume.PersistentVolumeClaim.ClaimName)
		}
	}
	return claims
}

// Where capacity does not count, a node without any is as good as another one. In each case the node with the device has none left, and
// with a volume for which it counts the pod would wait.
func TestCapacityDoesNotCountWhereItMustNot(t *testing.T) {
	t.Parallel()
	scheduler := startScheduler(t, namePrefix(t.Name())+"scheduler", schedulerSetup{})
	tests := map[string]struct {
		driver func(*storagev1.CSIDriver, *storagev1.StorageClass)
		// volume makes the volume, and returns what the pod wants.
		volume func(s *storage) podOption
		waits  bool
	}{
		"it counts": {
			volume: func(s *storage) podOption { s.addVolumeClaim("data"); return withVolume("data") },
			waits:  true,
		},
		"a driver that does not tell of capacity": {
			driver: func(driver *storagev1.CSIDriver, _ *storagev1.StorageClass) {
				driver.Spec.StorageCapacity = ptr.To(false)
			},
			volume: func(s *storage) podOption { s.addVolumeClaim("data"); return withVolume("data") },
		},
		"a volume that is provisioned at once": {
			driver: func(_ *storagev1.CSIDriver, class *storagev1.StorageClass) {
				class.VolumeBindingMode = ptr.To(storagev1.VolumeBindingImmediate)
			},
			volume: func(s *storage) podOption {
				s.addBoundVolume("data", "gpu", v1.ReadWriteOnce)
				return withVolume("data")
			},
		},
		"a volume that lives and ends with its pod": {
			driver: func(driver *storagev1.CSIDriver, _ *storagev1.StorageClass) {
				driver.Spec.VolumeLifecycleModes = []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecycleEphemeral}
			},
			volume: func(s *storage) podOption {
				return func(p *v1.Pod) {
					source := v1.VolumeSource{CSI: &v1.CSIVolumeSource{Driver: s.driver}}
					p.Spec.Volumes = append(p.Spec.Volumes, v1.Volume{Name: "data", VolumeSource: source})
				}
			},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := worldOf(t, scheduler)
			var options []func(*storagev1.CSIDriver, *storagev1.StorageClass)
			if tc.driver != nil {
				options = append(options, tc.driver)
			}
			s := w.addStorage(options...)
			s.provision(func(string) bool { return false })
			w.addNode("gpu", gpus(h100, 1)...)
			w.addNode("storage")
			for _, node := range []string{"gpu", "storage"} {
				s.reaches(node, node)
			}
			s.must(s.setCapacity("gpu", "0"), "publishing the capacity of segment gpu")
			s.fill("storage")
			w.addClaim("wanted", spec(w.exactly("gpu", 1)))
			w.addPod("pod", withClaim("wanted"), tc.volume(s))
			if tc.waits {
				w.awaitUnschedulable("pod", "0/", "1 node(s) "+noStorage, "1 "+tooFewDevices)
				return
			}
			w.awaitBoundTo("pod", "gpu")
		})
	}
}
