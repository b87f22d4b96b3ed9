package hostile

import (
	"encoding/json"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apiserver/pkg/cel/environment"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/utils/ptr"
)

// TestTheAPIServerTakesTheExpressions compiles them as it does.
func TestTheAPIServerTakesTheExpressions(t *testing.T) {
	compiler := cel.GetCompiler(cel.Features{EnableConsumableCapacity: true})
	most := uint64(0)
	for _, text := range Expressions() {
		result := compiler.CompileCELExpression(text, cel.Options{EnvType: ptr.To(environment.NewExpressions)})
		if result.Error != nil || len(text) > resourceapi.CELSelectorExpressionMaxLength || result.MaxCost > resourceapi.CELSelectorExpressionMaxCost {
			t.Errorf("%.80s: %d bytes, cost %d, %v", text, len(text), result.MaxCost, result.Error)
			continue
		}
		most = max(most, result.MaxCost)
	}
	if most < resourceapi.CELSelectorExpressionMaxCost*3/4 {
		t.Errorf("the most costly is %d, which is far from the limit", most)
	}
}

func TestTheSameSeedMakesTheSameObjects(t *testing.T) {
	draw := func(seed uint64) string {
		g := New(seed, "ns", "a", "b")
		var all strings.Builder
		for range 5 {
			if err := json.NewEncoder(&all).Encode([]any{g.Pool(), g.Class(), g.Claim(), g.Template(), g.Pod([]string{"c"}, []string{"t"})}); err != nil {
				t.Fatal(err)
			}
		}
		return all.String()
	}
	first := draw(1)
	if draw(1) != first {
		t.Error("the same seed makes other objects")
	}
	if draw(2) == first {
		t.Error("another seed makes the same objects")
	}
}
