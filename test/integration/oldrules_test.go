package integration

import (
	"testing"

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
		// The pod waits for the claim that is made for it, by which time the scheduler has heard of the rule; if not, it is
		// placed and the test fails.
		w.addPod("pod-"+version, withTemplate("one"))
		w.awaitUnschedulable("pod-"+version, "taint")
		w.must(beta.Delete(w.ctx, name, metav1.DeleteOptions{}), "deleting the rule of %s", version)
		w.awaitBound("pod-" + version)
		w.deletePod("pod-" + version)
	}
}
