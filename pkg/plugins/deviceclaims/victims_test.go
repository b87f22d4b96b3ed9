package deviceclaims

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func preempted(pod *v1.Pod, reason string) *v1.Pod {
	pod.Status.Conditions = append(pod.Status.Conditions, v1.PodCondition{Type: v1.DisruptionTarget, Status: v1.ConditionTrue, Reason: reason})
	return pod
}

// The pods with devices that are nominated to a node are woken when one is gone that was evicted from it, and for no
// other pod that goes.
func TestNominatedPodsAreWokenWhenAVictimIsGone(t *testing.T) {
	const low, high = 10, 100
	wants, other, plain := pending("wants", high, "wanted"), pending("other", high, "another"), pending("plain", high)
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("wanted"), claim("another")}
	w.pods = []*v1.Pod{
		wants, other, plain,
		running("ended", "node-a", low),
		preempted(running("evicted-by-another", "node-a", low), v1.PodReasonTerminationByKubelet),
		preempted(running("elsewhere", "node-b", low), v1.PodReasonPreemptionByScheduler),
		preempted(running("victim", "node-a", low), v1.PodReasonPreemptionByScheduler),
	}
	h := newHarness(t, w)
	remove := func(name string) {
		if err := h.client.CoreV1().Pods(testNamespace).Delete(h.ctx, name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		h.eventually("the deletion of "+name+" is known", func() bool { return h.plugin.shared.knowsNot(name) })
	}
	h.nominator.nominate("node-a", other)
	for _, name := range []string{"ended", "evicted-by-another", "elsewhere"} {
		remove(name)
	}
	h.nominator.nominate("node-a", wants, plain)
	remove("victim") // informers tell of deletions in order
	h.wakes("wants")
}

// knowsNot tells whether the lister does not have the pod.
func (s *Shared) knowsNot(pod string) bool {
	_, err := s.factory.Core().V1().Pods().Lister().Pods(testNamespace).Get(pod)
	return err != nil
}
