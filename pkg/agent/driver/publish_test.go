package driver

import (
	"errors"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2/ktesting"
)

// TestSlicesThatAreNotPublishedAsWantedAreCounted: the controller calls every error recoverable, but some stay
// until the cluster or the agent changes.
func TestSlicesThatAreNotPublishedAsWantedAreCounted(t *testing.T) {
	registerMetrics()
	_, ctx := ktesting.NewTestContext(t)
	p := newPublisher(Options{NodeName: "node-1"}, newStatus())
	for reason, err := range map[string]error{
		"dropped_fields": &resourceslice.DroppedFieldsError{PoolName: "node-1", DesiredSlice: &resourceapi.ResourceSlice{}, ActualSlice: &resourceapi.ResourceSlice{}},
		"invalid":        apierrors.NewInvalid(schema.GroupKind{Group: resourceapi.GroupName, Kind: "ResourceSlice"}, "slice", nil),
		"other":          errors.New("the API server is away"),
	} {
		before, metricErr := testutil.GetCounterMetricValue(sliceErrors.WithLabelValues(reason))
		if metricErr != nil {
			t.Fatal(metricErr)
		}
		p.handleError(ctx, err, "processing ResourceSlice objects")
		after, metricErr := testutil.GetCounterMetricValue(sliceErrors.WithLabelValues(reason))
		if metricErr != nil {
			t.Fatal(metricErr)
		}
		if after != before+1 {
			t.Errorf("%s counted %v times", reason, after-before)
		}
	}
}
