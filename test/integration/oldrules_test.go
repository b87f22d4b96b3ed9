// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourcealpha "k8s.io/api/resource/v1alpha3"
	resourcebeta "k8s.io/api/resource/v1beta2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Rules that are written with older versions of the API taint devices, too.
func testRulesOfOlderVersions(t *testing.T, w *world) {
	w.addNode("a", gpus(h100, 1)...)
	w.addTemplate("one", spec(w.exactly("gpu", 1)))
	name, pool := w.name+"-rule", w.nodeName("a")
	alpha, beta := w.client.ResourceV1alpha3().DeviceTaintRules(), w.client.ResourceV1beta2().DeviceTaintRules()
	t.Cleanup(func() { w.cleanUp(beta.Delete, name) })
	for version, create := range map[string]func() error{
		"v1alpha3": func() error {
			_, err := alpha.Create(w.ctx, &resourcealpha.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourcealpha.DeviceTaintRuleSpec{
				DeviceSelector: &resourcealpha.DeviceTaintSelector{Driver: &w.driver, Pool: &pool},
				Taint:          resourcealpha.DeviceTaint{Key: broken.Key, Effect: resourcealpha.DeviceTaintEffectNoSchedule},
			}}, metav1.CreateOptions{})
			return err
		},
		"v1beta2": func() error {
			_, err := beta.Create(w.ctx, &resourcebeta.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourcebeta.DeviceTaintRuleSpec{
				DeviceSelector: &resourcebeta.DeviceTaintSelector{Driver: &w.driver, Pool: &pool},
				Taint:          resourcebeta.DeviceTaint{Key: broken.Key, Effect: resourcebeta.DeviceTaintEffectNoSchedule},
			}}, metav1.CreateOptions{})
			return err
		},
	} {
		w.must(create(), "creating a rule of %s", version)
		waiting := w.addPodThatIsHeldBack("pod-" + version)
		w.must(beta.Delete(w.ctx, name, metav1.DeleteOptions{}), "deleting the rule of %s", version)
		w.awaitBound(waiting)
		w.deletePod(waiting)
	}
}

// addPodThatIsHeldBack adds a pod that a taint keeps waiting, and returns its name. One that comes before the scheduler has heard of the
// taint's rule is placed: then it goes, and another one comes.
func (w *world) addPodThatIsHeldBack(prefix string) (name string) {
	w.t.Helper()
	for i := range 10 {
		name = fmt.Sprintf("%s-%d", prefix, i)
		w.addPod(name, withTemplate("one"))
		pod := w.awaitPod(name, "placed, or kept waiting by a taint", func(p *v1.Pod) bool {
			c := scheduledCondition(p)
			return p.Spec.NodeName != "" || c != nil && c.Status == v1.ConditionFalse && strings.Contains(c.Message, "taint")
		})
		if pod.Spec.NodeName == "" {
			return name
		}
		w.deletePod(name)
	}
	w.t.Fatalf("pod %s and all before it were placed on a device with a taint", name)
	return ""
}
