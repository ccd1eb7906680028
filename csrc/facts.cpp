// What src/subulp/ops/facts.py compares when the library is loaded.
#include <string>

#include "mix.h"
#include "subulp.h"

extern "C" const char* subulp_facts(void) {
  static const std::string text = [] {
    std::string t;
    const auto number = [&t](const char* what, int64_t value) {
      t += what + (" " + std::to_string(value)) + "\n";
    };
#define NAME_ISA(code, name) t += "isa " name "\n";
#define NAME_FORMAT(code, name, type) t += "format " name "\n";
#define NAME_RULE(code, name) t += "rule " name "\n";
#define NAME_RECIPE(code, name) t += "recipe " name "\n";
#define NAME_SCALING(code, name) t += "scaling " name "\n";
#define NAME_METRIC(code, name) t += "metric " name "\n";
#define NAME_STRATEGY(code, name, weight, slow, wide, random, dtypes) \
  t += "strategy " name " " #weight " " #slow " " #wide " " #random " " #dtypes "\n";
#define NAME_CONSTANT(name, value) number("constant " #name, value);
#define NAME_SCALAR(type, name) t += "scalar " #type " " #name "\n";
    SUBULP_ISAS(NAME_ISA)
    SUBULP_FLOATS(NAME_FORMAT)
    SUBULP_INTEGERS(NAME_FORMAT)
    SUBULP_RULES(NAME_RULE)
    SUBULP_RECIPES(NAME_RECIPE)
    SUBULP_SCALINGS(NAME_SCALING)
    SUBULP_METRICS(NAME_METRIC)
    SUBULP_STRATEGIES(NAME_STRATEGY)
    SUBULP_CONSTANTS(NAME_CONSTANT)
    SUBULP_SCALARS(NAME_SCALAR)
    number("size step", sizeof(subulp_step));
    number("size scalars", sizeof(subulp_scalars));
    number("size table", sizeof(subulp_table));
    number("size lookups", sizeof(subulp_lookups));
    number("size mixture", sizeof(subulp_mixture));
    number("size blocks", sizeof(subulp_blocks));
    number("size narrow", sizeof(subulp_narrow));
    number("size product", sizeof(subulp_product));
    number("size product_blocks", sizeof(subulp_product_blocks));
    number("size positives", sizeof(subulp_positives));
    number("size head", sizeof(subulp_head));
    for (const uint32_t row : {0u, 1u, 0x12345678u, 0x7FFFFFFFu}) number("mix", subulp_mix(row));
    return t;
  }();
  return text.c_str();
}
